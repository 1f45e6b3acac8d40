// What a table whose changes somebody begins to read has to know of the rows that are there.
#pragma once

#include "base/rows.h"
#include "index/index.h"

namespace shoal {

// Writes every row's key to its slot and says that the row did not change: what was flagged before was listed by nobody.
// REQUIRES: the rows' keys are kept, and nobody else has the table.
void begin_tracking(const Index& index, const Rows& rows, int threads);

}  // namespace shoal
