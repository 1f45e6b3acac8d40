// How many rows a group's tables can have at most, and whether more fit. The device counts its keys, and the host hears
// of it later; until then every key that a batch could have brought counts as new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace shoal {

// Most new keys of a batch, by table, and after these by family: families are tables that share rows of one layout.
struct Births {
  std::vector<int64_t> by_place;

  int64_t operator[](size_t place) const { return by_place[place]; }
};

class Room {
 public:
  // `most_rows`: by table, the most that it may have.
  Room(std::vector<int32_t> family_of, std::vector<int64_t> most_rows, size_t families);

  size_t tables() const { return family_of_.size(); }
  size_t places() const { return fit_.size(); }

  // What so many new keys of each table are.
  Births births(const std::vector<int64_t>& by_table) const;

  // Whether so many batches of new keys surely fit, in addition to all rows that may be there by now.
  bool fits(const Births& births, int64_t batches = 1) const;

  // Counts a batch, if it surely fits.
  bool take(const Births& births);
  void add(const Births& births);

  // Most rows that are there by now, by table, and after the tables by family; and how many fit.
  int64_t most(size_t place) const { return known_[place] + added_[place]; }
  int64_t fit(size_t place) const { return fit_[place]; }
  void set_fit(size_t place, int64_t rows) { fit_[place] = rows; }
  // A family's rows are counted from 0 again.
  void recount(size_t place) { known_[place] = -added_[place]; }
  // A family that has a row for all its tables may have takes every key.
  void set_whole(size_t family, bool whole) { whole_[family] = whole; }
  // A table may have so many rows less.
  void lower(size_t table, int64_t rows) { most_rows_[table] -= rows; }

  // By family, rows that so many batches of new keys can bring: no table goes beyond what it may have.
  std::vector<int64_t> new_rows(const Births& births, int64_t batches) const;

  // A copy of the device's counts is on its way, the last of so many that are kept; and it came.
  void sent(int64_t copy, int64_t kept);
  void heard(int64_t copy, const int32_t* counted);
  size_t remembered() const { return added_by_.size(); }

 private:
  std::vector<int32_t> family_of_;
  std::vector<int64_t> most_rows_;  // by table
  // Rows that were counted, less what had been added by then; all that batches could have added; rows that fit.
  std::vector<int64_t> known_, added_, fit_;
  std::vector<char> whole_;
  std::deque<std::pair<int64_t, std::vector<int64_t>>> added_by_;  // by copy
};

// What follows from how many keys each feature of a batch has.
struct BatchSizes {
  std::vector<int64_t> counts;
  int64_t least = 0;
  int64_t keys = 0;
  int64_t elements = 0;  // of the output, without pooling
  Births births;
};

// How features meet tables: each pair of them is a part of a lookup.
struct BatchParts {
  struct Part {
    int32_t source;  // feature
    int32_t table;
    int64_t dim;
    bool trains;
  };
  std::vector<Part> parts;

  // REQUIRES: a count for each feature.
  BatchSizes sizes(std::vector<int64_t> counts, const Room& room) const;
};

}  // namespace shoal
