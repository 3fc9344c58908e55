"""Meshes, sharding plans, expert placement and the exchanges between devices."""
