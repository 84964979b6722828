"""What runs left behind, as one HTML page."""
