"""The descriptors of tables that kernels read: where a table's buckets are, how many rows it may have, its family."""

import triton.language as tl

NO_SLOT = tl.constexpr(-1)
# Columns of the tables' descriptors.
TABLE_COLUMNS = tl.constexpr(4)
AT = tl.constexpr(0)
BUCKETS = tl.constexpr(1)
MOST_ROWS = tl.constexpr(2)
FAMILY = tl.constexpr(3)
