"""pyarrow and Pillow, or a message on how to install them."""

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from PIL import Image
except ImportError as error:
    raise ImportError(
        f"kept episodes are Parquet files and images, which need pyarrow and Pillow: pip install -e '.[data]' in "
        f"ejax's folder ({error})"
    ) from error

__all__ = ["Image", "pa", "pc", "pq"]
