"""A worker's session: join, heartbeats, views, barriers and the store."""
