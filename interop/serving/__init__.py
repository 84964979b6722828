"""A policy server over WebSocket, with the protocol of openpi's client."""
