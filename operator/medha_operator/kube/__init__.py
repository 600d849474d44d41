"""The Kubernetes API: client, informers, leases, secrets, events."""
