"""bench: ways to shard, measured beside each other on real ranks; what `mmfsdp bench` and the course run."""
