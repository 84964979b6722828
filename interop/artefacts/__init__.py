"""The files of an export: their formats, how they are written, and the certificate over them."""
