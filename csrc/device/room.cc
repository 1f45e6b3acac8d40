#include "device/room.h"

#include <algorithm>

namespace shoal {

Room::Room(std::vector<int32_t> family_of, std::vector<int64_t> most_rows, size_t families)
    : family_of_(std::move(family_of)),
      most_rows_(std::move(most_rows)),
      known_(family_of_.size() + families),
      added_(known_.size()),
      fit_(known_.size()),
      whole_(families),
      added_by_{{0, added_}} {}

Births Room::births(const std::vector<int64_t>& by_table) const {
  std::vector<int64_t> by_place = by_table;
  by_place.resize(places());
  for (size_t table = 0; table < tables(); ++table) by_place[tables() + family_of_[table]] += by_table[table];
  return {std::move(by_place)};
}

bool Room::fits(const Births& births, int64_t batches) const {
  for (size_t table = 0; table < tables(); ++table) {
    if (std::min(most(table) + batches * births[table], most_rows_[table]) > fit_[table]) return false;
  }
  std::vector<int64_t> fewer;
  for (size_t family = 0; family < whole_.size(); ++family) {
    const size_t place = tables() + family;
    if (whole_[family] || most(place) + batches * births[place] <= fit_[place]) continue;
    if (fewer.empty()) fewer = new_rows(births, batches);
    if (most(place) + fewer[family] > fit_[place]) return false;
  }
  return true;
}

bool Room::take(const Births& births) {
  if (!fits(births)) return false;
  add(births);
  return true;
}

void Room::add(const Births& births) {
  for (size_t place = 0; place < places(); ++place) added_[place] += births[place];
}

std::vector<int64_t> Room::new_rows(const Births& births, int64_t batches) const {
  std::vector<int64_t> rows(whole_.size());
  for (size_t table = 0; table < family_of_.size(); ++table) {
    const int64_t left = std::max<int64_t>(most_rows_[table] - most(table), 0);
    rows[family_of_[table]] += std::min(batches * births[table], left);
  }
  return rows;
}

void Room::sent(int64_t copy, int64_t kept) {
  added_by_.emplace_back(copy, added_);
  while (added_by_.front().first <= copy - kept) added_by_.pop_front();
}

void Room::heard(int64_t copy, const int32_t* counted) {
  while (added_by_.size() > 1 && added_by_.front().first < copy) added_by_.pop_front();
  const std::vector<int64_t>& added = added_by_.front().second;
  for (size_t place = 0; place < places(); ++place) known_[place] = counted[place] - added[place];
}

BatchSizes BatchParts::sizes(std::vector<int64_t> counts, const Room& room) const {
  BatchSizes sizes;
  std::vector<int64_t> by_table(room.tables());
  for (const Part& part : parts) {
    sizes.elements += counts[part.source] * part.dim;
    if (part.trains) by_table[part.table] += counts[part.source];
  }
  sizes.births = room.births(by_table);
  for (const int64_t count : counts) sizes.keys += count;
  if (!counts.empty()) sizes.least = *std::min_element(counts.begin(), counts.end());
  sizes.counts = std::move(counts);
  return sizes;
}

}  // namespace shoal
