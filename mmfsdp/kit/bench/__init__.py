"""bench: ways to shard, compared with each other on real ranks; what `mmfsdp bench` and the course run."""
