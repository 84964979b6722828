"""One policy on several physics engines, and under shifted physics: ``ejax transfer``, docs/transfer.md."""
