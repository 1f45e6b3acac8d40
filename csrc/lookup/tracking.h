// What a table must know of the rows that it has before its changes are tracked.
#pragma once

#include "base/rows.h"
#include "index/index.h"

namespace shoal {

// Writes every row's key to its slot and flags the row unchanged: rows that were flagged before are in no list.
// REQUIRES: the rows' keys are kept, and no other thread uses the table.
void begin_tracking(const Index& index, const Rows& rows, int threads);

}  // namespace shoal
