"""Exporters of policy classes: one ``Exporter`` a file, named by ``PolicyKind.exporters``."""
