"""Stand in for Newton, without which EmbodiChain skips the tests of its planar arm; ejax's arm needs no simulator."""
