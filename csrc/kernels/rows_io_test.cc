#include "kernels/rows_io.h"

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "store/dram.h"

namespace shoal {
namespace {

// A store with some rows, born as zeros with state 0, 1, 2 and score 5, and no flags.
// Facts other than the score are born as 21 and 22.
const int64_t kFirstFacts[2] = {21, 22};
std::string first_facts() { return {reinterpret_cast<const char*>(kFirstFacts), sizeof kFirstFacts}; }

void read_state(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t width, const float* missing,
                float* out) {
  read_column(rows, slots, n, 4 * from, 4 * width, reinterpret_cast<const char*>(missing),
              reinterpret_cast<char*>(out));
}
void write_state(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t width, const float* in) {
  write_column(rows, slots, n, 4 * from, 4 * width, reinterpret_cast<const char*>(in));
}
void read_scores(const Rows& rows, const uint32_t* slots, int64_t n, double* out) {
  const double missing = NAN;
  read_column(rows, slots, n, 4 * rows.state_floats, 8, reinterpret_cast<const char*>(&missing),
              reinterpret_cast<char*>(out));
}
void write_scores(const Rows& rows, const uint32_t* slots, int64_t n, const double* in) {
  write_column(rows, slots, n, 4 * rows.state_floats, 8, reinterpret_cast<const char*>(in));
}

struct Table {
  DramStore store;
  std::vector<int64_t> keys;
  std::vector<uint32_t> slots;

  Table(int32_t dim, Dtype dtype, int64_t n, std::string facts = {})
      : store(dim, dtype, 3, std::move(facts)), slots(static_cast<size_t>(n)) {
    CHECK(store.reserve(n).ok());
    store.take(slots.data(), n);
    for (int64_t i = 0; i < n; ++i) keys.push_back(100 * i - 7);
    const float state[3] = {0.0f, 1.0f, 2.0f};
    birth(store.rows(), {}, state, {5.0, 0}, keys.data(), slots.data(), n, 1);
    for (uint32_t slot : slots) flags(slot) = 0;
  }
  const Rows& rows() const { return store.rows(); }
  uint32_t& flags(uint32_t slot) const { return rows().flags(rows().tail(slot)); }
};

void what_is_written_is_read() {
  Random random(1);
  for (int32_t dim : {1, 3, 15, 16, 17, 64, 100, 129})
    for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
      for (const std::string& isa : available_isas()) {
        CHECK(set_isa(isa), isa);
        constexpr size_t kRows = 2500;
        Table table(dim, dtype, kRows);
        size_t width = static_cast<size_t>(dim);
        std::vector<float> in(kRows * width), out(kRows * width), alone(width);
        for (float& x : in) x = static_cast<float>(random.below(256)) / 64.0f;  // exact in every dtype
        write_weights(table.rows(), table.slots.data(), kRows, in.data());
        for (int threads : {1, 3}) {
          std::fill(out.begin(), out.end(), NAN);
          read_weights(table.rows(), {}, table.keys.data(), table.slots.data(), kRows, out.data(), threads);
          CHECK(in == out, dim, isa, threads);
        }
        CHECK(table.flags(table.slots[3]) == (kChanged | kDirty), table.flags(table.slots[3]));
        // A slot that comes twice keeps the last.
        uint32_t twice[2] = {table.slots[8], table.slots[8]};
        write_weights(table.rows(), twice, 2, in.data());
        read_weights(table.rows(), {}, &table.keys[8], &table.slots[8], 1, alone.data(), 1);
        CHECK(std::equal(alone.begin(), alone.end(), in.begin() + dim), dim, isa);
      }
}

void missing_rows_read_as_they_are_told() {
  Table table(5, Dtype::f32, 10);
  std::vector<uint32_t> slots = table.slots;
  slots[4] = slots[9] = kNoSlot;
  std::vector<float> out(50, NAN);
  Init ones{InitKind::constant, 1.0f, 0.0f, 0};
  read_weights(table.rows(), ones, table.keys.data(), slots.data(), 10, out.data(), 1);
  for (size_t i = 0; i < 50; ++i) CHECK(out[i] == (i / 5 == 4 || i / 5 == 9 ? 1.0f : 0.0f), i, out[i]);
}

void columns_of_the_state() {
  Table table(4, Dtype::bf16, 6);
  const float in[4] = {7.0f, 8.0f, 9.0f, 10.0f}, missing[2] = {-1.0f, -2.0f};
  uint32_t some[2] = {table.slots[5], table.slots[0]};
  write_state(table.rows(), some, 2, 1, 2, in);
  CHECK(table.flags(table.slots[0]) == (kChanged | kDirty) && table.flags(table.slots[1]) == 0);
  uint32_t asked[4] = {table.slots[0], kNoSlot, table.slots[5], table.slots[2]};
  float out[8];
  read_state(table.rows(), asked, 4, 1, 2, missing, out);
  const float wanted[8] = {9.0f, 10.0f, -1.0f, -2.0f, 7.0f, 8.0f, 1.0f, 2.0f};
  for (int i = 0; i < 8; ++i) CHECK(out[i] == wanted[i], i, out[i], wanted[i]);
  read_state(table.rows(), asked, 1, 0, 1, missing, out);
  CHECK(out[0] == 0.0f, out[0]);
}

void scores() {
  Table table(4, Dtype::f32, 4);
  const double in[2] = {-1.5, 1e300};
  write_scores(table.rows(), table.slots.data() + 1, 2, in);
  uint32_t asked[4] = {table.slots[0], table.slots[1], table.slots[2], kNoSlot};
  double out[4];
  read_scores(table.rows(), asked, 4, out);
  CHECK(out[0] == 5.0 && out[1] == -1.5 && out[2] == 1e300 && std::isnan(out[3]));
  CHECK(table.flags(table.slots[0]) == 0 && table.flags(table.slots[1]) == (kChanged | kDirty));
}

void a_touch_only_raises_scores_of_rows_that_are_there() {
  Table table(4, Dtype::f32, 5);
  const double before[4] = {5.0, 6.0, 7.0, 5.0};
  write_scores(table.rows(), table.slots.data(), 4, before);
  for (uint32_t slot : table.slots) table.flags(slot) = 0;
  uint32_t erased = table.slots[3];
  set_flags(table.rows(), &erased, 1, kErased);
  uint32_t used[6] = {table.slots[0], kNoSlot, table.slots[1], table.slots[2], table.slots[3], table.slots[0]};
  ChangedRows changed;
  touch(table.rows(), used, 6, 6.0, &changed);
  CHECK(changed.take_slots() == std::vector<uint32_t>{table.slots[0]});
  double out[5];
  read_scores(table.rows(), table.slots.data(), 5, out);
  CHECK(out[0] == 6.0 && out[1] == 6.0 && out[2] == 7.0 && out[3] == 5.0 && out[4] == 5.0);
  // Only where the score changed did the row.
  CHECK(table.flags(table.slots[0]) == (kChanged | kDirty) && table.flags(table.slots[1]) == 0);
  CHECK(table.flags(table.slots[2]) == 0 && table.flags(table.slots[3]) == kErased && table.flags(table.slots[4]) == 0);
  touch(table.rows(), used, 6, 7.0, &changed);
  CHECK(changed.take_slots() == std::vector<uint32_t>{table.slots[1]});
  touch(table.rows(), used, 6, 7.0, &changed);
  CHECK(changed.take_slots().empty());
}

void rows_leave_and_come_in_columns() {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    constexpr int64_t kRows = 3000;
    Table from(5, dtype, kRows), to(5, dtype, kRows);
    std::vector<float> state(kRows * 3);
    std::vector<double> scores(kRows);
    for (size_t i = 0; i < state.size(); ++i) state[i] = float(i);
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = double(i) / 3;
    write_state(from.rows(), from.slots.data(), kRows, 0, 3, state.data());
    write_scores(from.rows(), from.slots.data(), kRows, scores.data());
    std::vector<uint32_t> order(from.slots.rbegin(), from.slots.rend());
    std::vector<char> weights(size_t(kRows * from.rows().weight_bytes));
    std::vector<float> one(kRows), two(kRows * 2);
    std::vector<double> out(kRows);
    const auto bytes = [](auto& column) { return reinterpret_cast<char*>(column.data()); };
    RowColumns columns{weights.data(), {{bytes(out), 12, 8}, {bytes(two), 4, 8}, {bytes(one), 0, 4}}};
    export_rows(from.rows(), order.data(), kRows, columns, 2);
    CHECK(one[0] == state[(kRows - 1) * 3] && two[1] == state[kRows * 3 - 1] && out[0] == scores.back());
    const float first[3] = {7, 8, 9};
    const std::vector<uint32_t> there(to.slots.rbegin(), to.slots.rend());
    import_rows(to.rows(), there.data(), kRows, columns, first, {1.0, 5}, kDirty, 2);
    for (size_t i = 0; i < kRows; ++i) {
      CHECK(std::memcmp(from.rows().weights(from.slots[i]), to.rows().weights(to.slots[i]),
                        size_t(from.rows().weight_bytes)) == 0);
      char *a = from.rows().tail(from.slots[i]), *b = to.rows().tail(to.slots[i]);
      CHECK(std::memcmp(from.rows().state(a), to.rows().state(b), 12) == 0);
      CHECK(to.rows().score(b) == scores[i] && to.rows().flags(b) == stamped(kDirty, 5));
    }
    // What is not given is as at birth.
    columns.tail.pop_back();
    columns.tail.erase(columns.tail.begin());
    import_rows(to.rows(), there.data(), kRows, columns, first, {1.0, 6}, kChanged | kDirty, 1);
    char* tail = to.rows().tail(to.slots[4]);
    CHECK(to.rows().state(tail)[0] == 7 && to.rows().state(tail)[2] == state[14] && to.rows().score(tail) == 1.0);
    CHECK(to.rows().flags(tail) == stamped(kChanged | kDirty, 6));
  }
}

void facts_are_born_and_go_where_the_row_goes() {
  for (const std::string& isa : available_isas()) {
    CHECK(set_isa(isa), isa);
    constexpr int64_t kRows = 2000;
    Table from(3, Dtype::f16, kRows, first_facts()), to(3, Dtype::f16, kRows, first_facts());
    const Rows& rows = from.rows();
    CHECK(rows.tail_bytes == 12 + 8 + 4 + 16 && packed_bytes(rows) == 6 + 12 + 8 + 16, rows.tail_bytes);
    const int32_t at = int32_t(rows.tail_bytes) - 16;
    std::vector<int64_t> first(kRows), second(kRows);
    const char* missing = reinterpret_cast<const char*>(kFirstFacts);
    const auto read = [&](const Table& table, int32_t which, std::vector<int64_t>* out) {
      read_column(table.rows(), table.slots.data(), kRows, at + 8 * which, 8, missing + 8 * which,
                  reinterpret_cast<char*>(out->data()));
    };
    read(from, 0, &first);
    read(from, 1, &second);
    for (size_t i = 0; i < kRows; ++i) CHECK(first[i] == 21 && second[i] == 22, i);
    for (size_t i = 0; i < kRows; ++i) second[i] = int64_t{1} << (i % 63);
    write_column(rows, from.slots.data(), kRows, at + 8, 8, reinterpret_cast<const char*>(second.data()));
    CHECK(from.flags(from.slots[5]) == (kChanged | kDirty) && rows.score(rows.tail(from.slots[5])) == 5.0);
    // To the lower tier and back.
    std::vector<char> packed(size_t(kRows * packed_bytes(rows)));
    pack(rows, from.slots.data(), kRows, packed.data(), 2);
    unpack(to.rows(), to.slots.data(), kRows, packed.data(), 9, 2);
    std::vector<int64_t> out(kRows);
    read(to, 1, &out);
    CHECK(out == second && to.flags(to.slots[5]) == stamped(0, 9), isa);
    // In columns: those that are not given are as at birth.
    std::vector<char> weights(size_t(kRows * rows.weight_bytes));
    RowColumns columns{weights.data(), {{reinterpret_cast<char*>(out.data()), at + 8, 8}}};
    export_rows(rows, from.slots.data(), kRows, columns, 2);
    CHECK(out == second, isa);
    const float state[3] = {7, 8, 9};
    import_rows(to.rows(), to.slots.data(), kRows, {weights.data(), {}}, state, {1.0, 5}, kDirty, 2);
    read(to, 1, &out);
    CHECK(out == std::vector<int64_t>(kRows, 22), isa);
    // A slot that moves takes them along.
    from.store.move(from.slots[7], from.slots[8]);
    read(from, 1, &out);
    CHECK(out[8] == second[7], out[8]);
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::what_is_written_is_read();
  shoal::missing_rows_read_as_they_are_told();
  shoal::columns_of_the_state();
  shoal::scores();
  shoal::a_touch_only_raises_scores_of_rows_that_are_there();
  shoal::rows_leave_and_come_in_columns();
  shoal::facts_are_born_and_go_where_the_row_goes();
}
