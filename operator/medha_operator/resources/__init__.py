"""Values: manifests, views of objects, actions, units."""
