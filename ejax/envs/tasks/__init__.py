"""Tasks that ejax ships."""
