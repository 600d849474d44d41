"""How ranks work together: TP shards, SPP stages, KVP groups and their generations."""
