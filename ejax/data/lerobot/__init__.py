"""Kept episodes: LeRobot v3.0 datasets, read and written. Needs the extra ``data``."""

try:
    import PIL  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kept episodes are Parquet files and images, which need pyarrow and Pillow: pip install -e '.[data]' in "
        f"ejax's folder ({error})"
    ) from error
