#include "device/room.h"

#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

// Three tables, of which the first and the last share a family; the second may have 5 rows.
Room three(int64_t fit = 100) {
  Room room({0, 1, 0}, {1000, 5, 1000}, 2);
  for (size_t place = 0; place < room.places(); ++place) room.set_fit(place, fit);
  return room;
}

void births_are_by_table_and_family() {
  CHECK((three().births({1, 2, 4}).by_place == std::vector<int64_t>{1, 2, 4, 5, 2}));
}

void what_came_since_counts_as_new() {
  Room room = three();
  const Births births = room.births({30, 0, 10});
  CHECK(room.take(births) && room.take(births));
  CHECK(room.most(0) == 60 && room.most(2) == 20 && room.most(3) == 80);
  CHECK(!room.take(births) && room.most(3) == 80);  // the family is full before the tables are
  CHECK(room.fits(room.births({20, 0, 0})) && !room.fits(room.births({10, 0, 0}), 3));
}

void what_the_device_counted_replaces_what_could_have_been() {
  Room room = three();
  const Births births = room.births({30, 0, 10});
  room.add(births);
  room.sent(1, 4);
  room.add(births);
  const std::vector<int32_t> counted = {3, 0, 2, 5, 0};
  room.heard(1, counted.data());
  CHECK(room.most(0) == 33 && room.most(2) == 12 && room.most(3) == 45 && room.remembered() == 1);
  room.sent(2, 4);
  room.heard(2, counted.data());
  CHECK(room.most(0) == 3 && room.most(3) == 5);
}

void only_the_copies_that_are_kept_are_remembered() {
  Room room = three(1 << 20);
  for (int64_t copy = 1; copy <= 20; ++copy) {
    room.add(room.births({1, 1, 1}));
    room.sent(copy, 4);
  }
  CHECK(room.remembered() == 4, room.remembered());
  const std::vector<int32_t> counted(5);
  room.heard(18, counted.data());
  CHECK(room.most(0) == 2 && room.remembered() == 3, room.most(0), room.remembered());
}

void a_table_never_has_more_than_it_may() {
  Room room = three();
  room.set_fit(1, 5);
  room.set_fit(4, 5);
  CHECK(room.fits(room.births({0, 700, 0})) && room.take(room.births({0, 3, 0})));
  CHECK((room.new_rows(room.births({1, 700, 2}), 2) == std::vector<int64_t>{6, 2}));
  room.lower(1, 4);
  CHECK((room.new_rows(room.births({0, 700, 0}), 1) == std::vector<int64_t>{0, 0}));
  room.set_fit(1, 0);
  CHECK(!room.fits(room.births({0, 1, 0})));
}

void a_family_that_is_whole_takes_all() {
  Room room = three();
  room.set_fit(3, 0);
  CHECK(!room.fits(room.births({1, 0, 0})));
  room.set_whole(0, true);
  CHECK(room.fits(room.births({1, 0, 0})));
}

void a_family_can_be_counted_anew() {
  Room room = three();
  room.add(room.births({60, 0, 0}));
  room.recount(3);
  CHECK(room.most(3) == 0 && room.most(0) == 60);
  room.add(room.births({7, 0, 0}));
  CHECK(room.most(3) == 7);
}

void sizes_follow_from_the_parts() {
  // The first feature feeds two tables; the second only reads one of them.
  const BatchParts parts{{{0, 0, 4, true}, {0, 1, 8, true}, {1, 0, 4, false}}};
  const BatchSizes sizes = parts.sizes({10, 3}, three());
  CHECK(sizes.least == 3 && sizes.keys == 13 && sizes.elements == 40 + 80 + 12, sizes.elements);
  CHECK((sizes.births.by_place == std::vector<int64_t>{10, 10, 0, 10, 10}));
  const BatchSizes none = BatchParts{}.sizes({}, three());
  CHECK(none.least == 0 && none.keys == 0 && none.elements == 0);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::births_are_by_table_and_family();
  shoal::what_came_since_counts_as_new();
  shoal::what_the_device_counted_replaces_what_could_have_been();
  shoal::only_the_copies_that_are_kept_are_remembered();
  shoal::a_table_never_has_more_than_it_may();
  shoal::a_family_that_is_whole_takes_all();
  shoal::a_family_can_be_counted_anew();
  shoal::sizes_follow_from_the_parts();
}
