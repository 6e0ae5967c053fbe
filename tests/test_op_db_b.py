"""PyTorch's op database on device "tpu", slice 2 of 4: see op_db.py."""

from op_db_slices import made_test

test_entry = made_test(1)
