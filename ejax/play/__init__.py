"""Trained policies in use: act, watch, push and command them; and episodes that are played again."""
