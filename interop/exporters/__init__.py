"""What export knows of each policy class: one ``Exporter`` a file, named by ``PolicyKind.exporters``."""
