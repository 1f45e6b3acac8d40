#include "store/ssd.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

std::shared_ptr<Io> io() {
  static const std::shared_ptr<Io> made = make_io(16);
  return made;
}

// A store and what should be in it.
struct Kept {
  explicit Kept(int64_t row_bytes, int64_t max_bytes = int64_t{8} << 20, bool collects = true)
      : options{folder() + "/store", row_bytes, max_bytes, true, collects ? int64_t{1} << 30 : 1} {
    const Status status = SsdStore::open(options, io(), &store);
    CHECK(status.ok(), status.message());
  }

  std::string row(int64_t key, int64_t version) const {
    std::string bytes(size_t(options.row_bytes), 0);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = char(uint64_t(key) * 31 + uint64_t(version) * 7 + i);
    return bytes;
  }

  Status write(const std::vector<int64_t>& keys, int64_t version) {
    std::string bytes;
    for (const int64_t key : keys) bytes += row(key, version);
    const Status status = store->write(keys.data(), bytes.data(), int64_t(keys.size()));
    if (status.ok())
      for (const int64_t key : keys) wanted[key] = version;
    return status;
  }

  void erase(const std::vector<int64_t>& keys) {
    int64_t there = 0;
    for (const int64_t key : keys) there += int64_t(wanted.erase(key));
    CHECK(store->erase(keys.data(), int64_t(keys.size())) == there);
  }

  // Reads and compares; keys whose block cannot be read may be missing. How many of the wanted ones were found.
  int64_t check(const std::vector<int64_t>& keys, Status* status = nullptr) {
    std::string bytes(keys.size() * size_t(options.row_bytes), 'x');
    const auto found = std::make_unique<bool[]>(keys.size());
    const Status answer = store->read(keys.data(), bytes.data(), found.get(), int64_t(keys.size()), &lost);
    if (status == nullptr) CHECK(answer.ok(), answer.message());
    CHECK(lost.empty() || !answer.ok());
    if (status != nullptr) *status = answer;
    int64_t count = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto version = wanted.find(keys[i]);
      if (version == wanted.end()) {
        CHECK(!found[i], keys[i]);
        continue;
      }
      CHECK(found[i] || status != nullptr, keys[i]);
      CHECK(!found[i] || !std::binary_search(lost.begin(), lost.end(), keys[i]), keys[i]);
      if (!found[i]) continue;
      ++count;
      CHECK(bytes.compare(i * size_t(options.row_bytes), size_t(options.row_bytes), row(keys[i], version->second)) == 0,
            keys[i]);
    }
    return count;
  }

  void check_all(int64_t keys) {
    std::vector<int64_t> all;
    for (int64_t key = -1; key <= keys; ++key) all.push_back(key);
    CHECK(check(all) == int64_t(wanted.size()));
    CHECK(store->rows() == int64_t(wanted.size()));
  }

  std::vector<std::string> files() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(options.directory.string()))
      if (entry.path().extension() == ".seg") found.push_back(entry.path().string());
    return found;
  }

  SsdOptions options;
  std::unique_ptr<SsdStore> store;
  std::map<int64_t, int64_t> wanted;
  std::vector<int64_t> lost;  // of the keys that were checked last
};

std::vector<int64_t> range(int64_t from, int64_t to) {
  std::vector<int64_t> keys;
  for (int64_t key = from; key < to; ++key) keys.push_back(key);
  return keys;
}

void rows_of_every_size_come_back() {
  for (const int64_t bytes : {1, 7, 256, 4064, 4065, 5000, 20'000}) {
    Kept kept(bytes, int64_t{16} << 20);
    CHECK(kept.write({0, -1, INT64_MAX, INT64_MIN, 42}, 1).ok());
    CHECK(kept.check({42, INT64_MIN, 5, INT64_MAX, -1, 0}) == 5, bytes);
    CHECK(kept.write({42, 43}, 2).ok());
    CHECK(kept.check({42, 43, 0}) == 3, bytes);
    kept.erase({42, 99});
    CHECK(kept.check({42, 43, 0}) == 2, bytes);
    std::vector<int64_t> none;
    CHECK(kept.write(none, 1).ok() && kept.check(none) == 0);
  }
}

void it_stays_within_its_files_however_often_rows_are_written() {
  for (const bool collects : {true, false}) {
    Kept kept(100, int64_t{4} << 20, collects);
    std::mt19937_64 random(7);
    const int64_t rows = kept.store->capacity();
    for (int64_t from = 0; from < rows; from += 1000)
      CHECK(kept.write(range(from, std::min(from + 1000, rows)), 0).ok());
    for (int64_t version = 1; version < 120; ++version) {
      std::map<int64_t, int> some;
      while (some.size() < 700) some[int64_t(random() % uint64_t(rows))];
      std::vector<int64_t> keys;
      for (const auto& [key, _] : some) keys.push_back(key);
      const Status status = kept.write(keys, version);
      CHECK(status.ok(), status.message());
      if (version % 3 == 0) {
        kept.erase({keys[0], keys[1]});
        CHECK(kept.write({keys[1]}, version).ok());
      }
      if (version % 40 == 0) kept.check_all(rows);
      int64_t bytes = 0;
      for (const std::string& file : kept.files()) {
        std::error_code gone;  // collected meanwhile
        const auto size = fs::file_size(file, gone);
        bytes += gone ? 0 : int64_t(size);
      }
      CHECK(bytes <= kept.options.max_bytes, bytes);
    }
    kept.check_all(rows);
    const SsdStats stats = kept.store->stats();
    CHECK(stats.collected_bytes > 0 && stats.file_bytes <= kept.options.max_bytes);
    CHECK(stats.written_bytes + stats.collected_bytes <= 2 * stats.written_bytes + (1 << 20), stats.written_bytes,
          stats.collected_bytes);
  }
}

void a_row_takes_24_bytes_of_memory_at_most() {
  Kept kept(16, int64_t{64} << 20, false);
  for (int64_t from = 0; from < 1'000'000; from += 50'000) {
    CHECK(kept.write(range(from, from + 50'000), 0).ok());
    const SsdStats stats = kept.store->stats();
    CHECK(from < 100'000 || stats.index_bytes <= 24 * stats.rows, stats.index_bytes, stats.rows);
  }
}

void what_is_cleared_or_closed_leaves_nothing_behind() {
  {
    Kept kept(64);
    CHECK(kept.write(range(0, 5000), 1).ok());
    kept.store->clear();
    kept.wanted.clear();
    CHECK(kept.files().empty() && kept.store->rows() == 0);
    CHECK(kept.write(range(3, 50), 2).ok());
    kept.check_all(60);
    CHECK(kept.store->keys().size() == 47);
  }
  CHECK(!fs::exists(folder() + "/store"));
}

void a_full_disk_loses_nothing() {
  Kept kept(256);
  CHECK(kept.write(range(0, 3000), 1).ok());
  for (const int error : {ENOSPC, EIO}) {
    Faults::instance().inject({FileCall::write, ".seg", error, 0, 1});
    const Status status = kept.write(range(1000, 1010), 2);
    CHECK(status.code() == Code::storage && status.message().find(".seg] writing") != std::string::npos,
          status.message());
    kept.check_all(3000);  // as it was
  }
  // Of many requests one fails: its rows stay as they were, the others are written.
  Faults::instance().inject({FileCall::write, ".seg", EIO, 1, 1});
  CHECK(!kept.write(range(0, 2000), 3).ok());
  Faults::instance().clear();
  std::string bytes(3000 * 256, 0);
  const auto found = std::make_unique<bool[]>(3000);
  CHECK(kept.store->read(range(0, 3000).data(), bytes.data(), found.get(), 3000).ok());
  int64_t old = 0;
  for (int64_t key = 0; key < 3000; ++key) {
    const std::string there = bytes.substr(size_t(key) * 256, 256);
    CHECK(found[key] && (there == kept.row(key, 1) || (key < 2000 && there == kept.row(key, 3))), key);
    old += there == kept.row(key, 1);
  }
  CHECK(old > 1000 && old < 3000, old);
  CHECK(kept.write(range(0, 2000), 4).ok());
  kept.check_all(3000);
}

void its_bytes_are_those_of_its_files() {
  Kept kept(256, int64_t{8} << 20, false);
  const auto check = [&] {
    int64_t bytes = 0;
    for (const std::string& file : kept.files()) bytes += int64_t(fs::file_size(file));
    CHECK(kept.store->stats().file_bytes == bytes, kept.store->stats().file_bytes, bytes);
    return bytes;
  };
  CHECK(check() == 0);
  // One that failed has written nothing.
  Faults::instance().inject({FileCall::write, ".seg", ENOSPC, 0, int64_t{1} << 40});
  CHECK(!kept.write(range(0, 3000), 1).ok());
  CHECK(check() == 0);
  Faults::instance().clear();
  CHECK(kept.write({1}, 1).ok());
  Faults::instance().inject({FileCall::write, ".seg", ENOSPC, 0, 1});
  CHECK(!kept.write({2}, 1).ok());
  CHECK(kept.write({3}, 1).ok() && fs::file_size(kept.files().at(0)) == 3 * 4096);
  CHECK(kept.store->stats().file_bytes == 2 * 4096);
  kept.store->clear();
  for (int64_t version = 1; version < 20; ++version) {
    CHECK(kept.write(range(0, 3000), version).ok());
    CHECK(check() > 0);  // with files of dead segments that were kept
  }
  kept.store->clear();
  CHECK(check() == 0);
}

void a_key_that_comes_twice_changes_nothing() {
  Kept kept(256, int64_t{64} << 20);
  CHECK(kept.write(range(0, 100), 1).ok());
  for (const int64_t apart : {int64_t{1}, int64_t{19'000}}) {  // in one request, and in two
    std::vector<int64_t> keys = range(50, 20'050);
    keys[size_t(apart)] = keys[0];
    const std::string bytes(keys.size() * 256, 'y');
    const Status status = kept.store->write(keys.data(), bytes.data(), int64_t(keys.size()));
    CHECK(status.code() == Code::input && status.message().find("must all be different") != std::string::npos,
          status.message());
    kept.check_all(20'050);
  }
  CHECK(kept.write(range(50, 20'050), 2).ok());
  kept.check_all(20'050);
}

void of_many_requests_those_that_fail_change_nothing() {
  for (const int64_t after : {0, 1, 5, 9, 14}) {
    Kept kept(256, int64_t{64} << 20);  // 20'000 rows are six requests and as many segments
    CHECK(kept.write(range(0, 10'000), 1).ok());
    Faults::instance().inject({FileCall::write, ".seg", EIO, after, 2});
    const std::vector<int64_t> keys = range(0, 20'000);
    const Status status = kept.write(keys, 2);
    Faults::instance().clear();
    if (!status.ok()) CHECK(status.message().find(".seg] ") != std::string::npos, status.message());
    std::string bytes(keys.size() * 256, 0);
    const auto found = std::make_unique<bool[]>(keys.size());
    CHECK(kept.store->read(keys.data(), bytes.data(), found.get(), int64_t(keys.size())).ok());
    int64_t rows = 0, written = 0;
    for (const int64_t key : keys) {
      const std::string there = bytes.substr(size_t(key) * 256, 256);
      const bool is_new = found[key] && there == kept.row(key, 2);
      CHECK(is_new || (key < 10'000 ? found[key] && there == kept.row(key, 1) : !found[key]), key);
      rows += found[key];
      written += is_new;
    }
    CHECK(status.ok() == (written == 20'000), written);
    CHECK(kept.store->rows() == rows, rows);
    CHECK(kept.write(keys, 3).ok());
    kept.check_all(20'000);
  }
}

void a_full_store_goes_on_once_calls_do_not_fail_any_more() {
  constexpr FileCall kCalls[] = {FileCall::write, FileCall::write, FileCall::write, FileCall::remove, FileCall::open};
  constexpr size_t kSome[] = {1, 5, 40, 200};
  for (int seed = 0; seed < 8; ++seed) {
    // As few segments as there can be, and many.
    Kept kept(256, seed % 4 < 2 ? int64_t{12 * 4 * 4096} : int64_t{2} << 20, seed % 2 == 0);
    const int64_t rows = kept.store->capacity();
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    std::vector<int64_t> keys = range(0, rows);
    CHECK(kept.write(keys, 0).ok());
    for (int64_t version = 1; version < 1000; ++version) {
      std::shuffle(keys.begin(), keys.end(), random);
      const std::vector<int64_t> some(keys.begin(), keys.begin() + int64_t(kSome[random() % std::size(kSome)]));
      if (random() % 2 == 0) {
        Faults::instance().inject({kCalls[random() % std::size(kCalls)], ".seg", random() % 2 == 0 ? ENOSPC : EIO,
                                   int64_t(random() % 3), int64_t(1 + random() % 2)});
      }
      (void)kept.write(some, version);
      Faults::instance().clear();
      // Now and then it is seen to, so that what is left of one failure is there at the next.
      if (version % 100 != 0) continue;
      const Status status = kept.write(some, version);
      CHECK(status.ok(), seed, version, status.message());
    }
    for (int64_t version = 1000; version < 1100; ++version) {
      std::shuffle(keys.begin(), keys.end(), random);
      const Status status = kept.write({keys.begin(), keys.begin() + 100}, version);
      CHECK(status.ok(), seed, version, status.message());
    }
    CHECK(kept.write(keys, 1100).ok());
    kept.check_all(rows);
  }
}

void files_of_dead_segments_are_written_to_again() {
  Kept kept(256, int64_t{64} << 20);
  for (int64_t version = 0; version < 30; ++version)
    for (int64_t from = 0; from < 10'000; from += 1000) CHECK(kept.write(range(from, from + 1000), version).ok());
  kept.check_all(10'000);
  const SsdStats stats = kept.store->stats();
  // Names are numbers of segments: of a hundred that there were, few have a file of their own.
  for (const std::string& file : kept.files()) CHECK(std::stoll(fs::path(file).stem()) < 20, file);
  CHECK(stats.written_bytes > int64_t{70} << 20, stats.written_bytes);
  kept.store->clear();
  kept.wanted.clear();
  CHECK(kept.files().empty());
}

void threads_that_write_erase_and_read_beside_the_collector_agree() {
  Kept kept(300, int64_t{3} << 20);
  constexpr int64_t kKeys = 1500;  // of each writer
  std::atomic<int> writers{2};
  std::vector<std::thread> threads;
  for (int number = 0; number < 2; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(number);
      std::vector<int64_t> keys = range(number * kKeys, (number + 1) * kKeys);
      for (int64_t version = 0; version < 60; ++version) {
        std::shuffle(keys.begin(), keys.end(), random);
        std::string bytes;
        const size_t some = version < 59 ? 400 : keys.size();
        for (size_t i = 0; i < some; ++i) bytes += kept.row(keys[i], version);
        CHECK(kept.store->write(keys.data(), bytes.data(), int64_t(some)).ok());
        CHECK(kept.store->erase(keys.data(), 50) == 50);
      }
      --writers;
    });
  }
  threads.emplace_back([&] {
    std::mt19937_64 random(7);
    std::string bytes(200 * 300, 0);
    bool found[200];
    while (writers > 0) {
      std::vector<int64_t> keys;
      for (int i = 0; i < 200; ++i) keys.push_back(int64_t(random() % (2 * kKeys)));
      CHECK(kept.store->read(keys.data(), bytes.data(), found, 200).ok());
      for (size_t i = 0; i < 200; ++i) {
        const char* const row = bytes.data() + i * 300;
        for (int at = 1; found[i] && at < 300; ++at) CHECK(row[at] == char(row[0] + at), at);
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(kept.store->rows() == 2 * (kKeys - 50), kept.store->rows());
  CHECK(kept.store->stats().collected_rows > 0);
}

void a_file_that_cannot_be_made_loses_nothing() {
  Kept kept(256);
  Faults::instance().inject({FileCall::open, ".seg", EACCES, 0, 1});
  const Status status = kept.write({1, 2}, 1);
  CHECK(status.code() == Code::storage && status.message().find("Make it writable") != std::string::npos);
  CHECK(kept.check({1, 2}) == 0);
  Faults::instance().clear();
  CHECK(kept.write({1, 2}, 2).ok() && kept.check({1, 2}) == 2);
}

void a_read_that_fails_can_be_made_again() {
  Kept kept(256);
  CHECK(kept.write(range(0, 300), 1).ok());
  Faults::instance().inject({FileCall::read, ".seg", EIO, 2, 1});
  Status status;
  const int64_t found = kept.check(range(0, 300), &status);
  CHECK(status.code() == Code::storage && status.message().find("Input/output error") != std::string::npos);
  CHECK(status.message().find(" are the rows of 15 keys: ") != std::string::npos &&
            status.message().find("Try again, if the disk may have been away for a moment. Else `erase` these") !=
                std::string::npos &&
            status.message().find("lost") == std::string::npos,
        status.message());
  CHECK(int64_t(kept.lost.size()) == 300 - found, found);
  CHECK(kept.store->stats().damaged == 0);
  CHECK(found < 300 && found >= 300 - 2 * 15, found);  // but for those of one block
  Faults::instance().clear();
  kept.check_all(300);
}

void what_the_system_has_no_means_for_is_not_lost() {
  Kept kept(256, int64_t{2} << 20);
  const int64_t rows = kept.store->capacity();
  CHECK(kept.write(range(0, rows), 0).ok());
  Faults::instance().inject({FileCall::read, ".seg", EMFILE, 0, int64_t{1} << 40});
  Status status;
  CHECK(kept.check({1, 2, 3}, &status) == 0);
  CHECK(status.message().find("ulimit -n") != std::string::npos && status.message().find("erase") == std::string::npos,
        status.message());
  CHECK(kept.lost.empty());
  std::mt19937_64 random(3);
  std::vector<int64_t> keys = range(0, rows);
  status = {};
  for (int64_t version = 1; status.ok(); ++version) {  // until one is to be collected
    CHECK(version < 1000);
    std::shuffle(keys.begin(), keys.end(), random);
    status = kept.write({keys.begin(), keys.begin() + 300}, version);
  }
  CHECK(status.message().find("ulimit -n") != std::string::npos, status.message());
  Faults::instance().clear();
  CHECK(kept.write(range(0, rows), 1000).ok());
  kept.check_all(rows);
}

void flip(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  char byte = char(file.get());
  file.seekp(at);
  file.put(char(byte ^ 4));
}

void several_stores_are_read_at_a_time_and_a_failure_is_its_own_store_s() {
  constexpr int64_t kSizes[] = {16, 5000, 256, 100};  // of rows: the blocks differ too
  std::vector<std::unique_ptr<SsdStore>> stores;
  for (size_t number = 0; number < std::size(kSizes); ++number) {
    stores.emplace_back();
    const std::string directory = folder() + "/together" + std::to_string(number);
    CHECK(SsdStore::open({directory, kSizes[number], int64_t{32} << 20}, io(), &stores.back()).ok());
    // The second stays empty.
    const std::vector<int64_t> keys = range(0, number == 1 ? 0 : 2000);
    std::string rows(keys.size() * size_t(kSizes[number]), 0);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = char(i / size_t(kSizes[number]) + 17 * number);
    CHECK(stores.back()->write(keys.data(), rows.data(), int64_t(keys.size())).ok());
  }
  for (const bool fails : {false, true}) {
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{100}, int64_t{1500}}) {  // in one thread, and in several
      const std::vector<int64_t> keys = range(1000, 1000 + n);
      std::vector<std::string> rows;
      std::vector<std::unique_ptr<bool[]>> found;
      std::vector<SsdStore::Read> reads;
      for (size_t number = 0; number < stores.size(); ++number) {
        rows.emplace_back(size_t(n * kSizes[number]), 'x');
        found.push_back(std::make_unique<bool[]>(size_t(n)));
      }
      for (size_t number = 0; number < stores.size(); ++number)
        reads.push_back({stores[number].get(), keys.data(), rows[number].data(), found[number].get(), n});
      if (fails) Faults::instance().inject({FileCall::read, "together2", EIO, 0, 1'000'000});
      SsdStore::read_together(&reads);
      Faults::instance().clear();
      for (size_t number = 0; number < stores.size(); ++number) {
        const bool failed = fails && number == 2 && n > 0;
        CHECK(reads[number].status.ok() != failed, number, n);
        CHECK(reads[number].lost == range(1000, failed ? std::min(1000 + n, int64_t{2000}) : 1000), number, n);
        for (int64_t i = 0; i < n; ++i) {
          const bool there = number != 1 && 1000 + i < 2000 && !failed;
          CHECK(found[number][size_t(i)] == there, number, i);
          const std::string row = rows[number].substr(size_t(i * kSizes[number]), size_t(kSizes[number]));
          CHECK(!there || row == std::string(size_t(kSizes[number]), char(1000 + i + 17 * int64_t(number))), number, i);
        }
      }
    }
  }
  std::vector<SsdStore::Read> none;
  SsdStore::read_together(&none);
}

void a_flipped_bit_is_seen_and_costs_no_other_block() {
  Kept kept(256);
  CHECK(kept.write(range(0, 300), 1).ok());
  flip(kept.files().at(0), 2 * 4096 + 777);
  Status status;
  const int64_t found = kept.check(range(0, 300), &status);
  CHECK(found == 300 - 15, found);
  CHECK(status.message().find(".seg] the block at 8192 is not what was written there") != std::string::npos,
        status.message());
  CHECK(status.message().find("15 keys: 30, 31, 32, 33, 34, 35, 36, 37, 38, 39 and 5 more. They are lost, the others "
                              "are not. `erase` them") != std::string::npos,
        status.message());
  CHECK(kept.lost == range(30, 45));
  CHECK(kept.store->stats().damaged == 1);
  // What is written anew, or erased, is as it should be.
  CHECK(kept.write(range(30, 40), 2).ok());
  kept.erase(range(40, 45));
  kept.check_all(300);
}

void a_cut_file_is_seen() {
  Kept kept(256);
  CHECK(kept.write(range(0, 300), 1).ok());
  fs::resize_file(kept.files().at(0), 4096);
  Status status;
  CHECK(kept.check(range(0, 300), &status) == 15);
  CHECK(status.message().find("cut. What was asked for and cannot be read are the rows of 285 keys: 15, 16, ") !=
            std::string::npos,
        status.message());
  CHECK(kept.lost == range(15, 300));
  // So that a caller that gets the error can go on without them.
  CHECK(kept.check({40, 3, 40}, &status) == 1 && kept.lost == std::vector<int64_t>{40});
  CHECK(status.message().find(" the rows of 1 key: 40. They are lost") != std::string::npos, status.message());
  kept.erase(range(15, 300));
  kept.check_all(300);
}

void all_that_a_call_cannot_read_is_told_at_once() {
  Kept kept(256, int64_t{8} << 20, false);  // segments of 480 rows
  const std::vector<int64_t> keys = range(0, 4800);
  CHECK(kept.write(keys, 1).ok());
  CHECK(kept.files().size() == 10, kept.files().size());
  for (const int64_t number : {1, 3, 4}) fs::resize_file(folder() + "/store/" + std::to_string(number) + ".seg", 0);
  flip(folder() + "/store/6.seg", 3 * 4096 + 5);
  Faults::instance().inject({FileCall::read, "/8.seg", EIO, 0, int64_t{1} << 40});
  const int64_t damaged = kept.store->stats().damaged;
  Status status;
  const int64_t found = kept.check(keys, &status);
  Faults::instance().clear();
  CHECK(found == 4800 - 4 * 480 - 15 && int64_t(kept.lost.size()) == 4800 - found, found, kept.lost.size());
  CHECK(std::is_sorted(kept.lost.begin(), kept.lost.end(), std::less_equal<>()));
  CHECK(kept.store->stats().damaged == damaged + 3 * 480 / 15 + 1, kept.store->stats().damaged);
  const std::string& told = status.message();
  CHECK(told.find("There are 2 more such files. What was asked for and cannot be read are the rows of 1935 keys: ") !=
            std::string::npos,
        told);
  CHECK(told.find("Try again") < told.find("`erase` these") && told.find("disk's health") != std::string::npos &&
            told.find("Let nothing else write") != std::string::npos,
        told);
  // What comes back is not lost, and all that is lost is erased at once.
  CHECK(kept.check(keys, &status) == 4800 - 3 * 480 - 15);
  kept.erase(kept.lost);
  kept.check_all(4800);
  CHECK(kept.write(keys, 2).ok());
  kept.check_all(4800);
}

void a_store_that_can_free_nothing_goes_on_once_what_is_lost_is_erased() {
  Kept kept(256, int64_t{2} << 20, true);
  const int64_t rows = kept.store->capacity();
  std::vector<int64_t> keys = range(0, rows);
  CHECK(kept.write(keys, 0).ok());
  for (const std::string& file : kept.files()) fs::resize_file(file, 0);
  std::mt19937_64 random(3);
  Status status;
  for (int64_t version = 1; version < 200 && status.ok(); ++version) {
    std::shuffle(keys.begin(), keys.end(), random);
    status = kept.write({keys.begin(), keys.begin() + 200}, version);
  }
  CHECK(status.message().find("`erase` the keys that the table's `unreadable()` finds") != std::string::npos,
        status.message());
  std::string bytes(keys.size() * 256, 0);
  const auto found = std::make_unique<bool[]>(keys.size());
  std::vector<int64_t> lost;
  CHECK(!kept.store->read(keys.data(), bytes.data(), found.get(), int64_t(keys.size()), &lost).ok());
  CHECK(lost.size() > 100 && std::count(found.get(), found.get() + rows, true) + int64_t(lost.size()) == rows);
  kept.erase(lost);
  for (int64_t version = 200; version < 300; ++version) {
    std::shuffle(keys.begin(), keys.end(), random);
    status = kept.write({keys.begin(), keys.begin() + 200}, version);
    CHECK(status.ok(), version, status.message());
  }
  CHECK(kept.write(keys, 300).ok());
  kept.check_all(rows);
}

void a_damaged_segment_is_not_collected_away() {
  Kept kept(100, int64_t{1} << 20, false);
  const int64_t rows = kept.store->capacity();
  CHECK(kept.write(range(0, rows), 0).ok());
  // The rows of a block of the first segment stay; all others are written again and again.
  const int64_t in_block = BlockLayout::of(100).rows_per_block;
  flip(folder() + "/store/1.seg", 100);
  std::mt19937_64 random(3);
  for (int64_t version = 1; version < 60; ++version) {
    std::map<int64_t, int> some;
    while (some.size() < 400) some[in_block + int64_t(random() % uint64_t(rows - in_block))];
    std::vector<int64_t> keys;
    for (const auto& [key, _] : some) keys.push_back(key);
    const Status status = kept.write(keys, version);
    CHECK(status.ok(), status.message());
  }
  CHECK(fs::exists(folder() + "/store/1.seg"));
  Status status;
  CHECK(kept.check(range(0, rows), &status) == rows - in_block && !status.ok());
}

void a_segment_that_cannot_be_read_stops_no_other() {
  Kept kept(256, int64_t{8} << 20, false);
  const int64_t rows = kept.store->capacity() * 9 / 10;
  CHECK(kept.write(range(0, rows), 0).ok());
  Faults::instance().inject({FileCall::read, "/4.seg", EIO, 0, int64_t{1} << 40});
  std::vector<int64_t> others, lost;
  for (const int64_t key : range(0, rows)) {
    Status status;
    (kept.check({key}, &status) == 1 ? others : lost).push_back(key);
  }
  CHECK(lost.size() > 100, lost.size());
  // Five rows stay on it.
  kept.erase({lost.begin() + 5, lost.end()});
  lost.resize(5);
  std::mt19937_64 random(3);
  for (int64_t version = 1; version < 200; ++version) {
    std::shuffle(others.begin(), others.end(), random);
    const Status status = kept.write({others.begin(), others.begin() + 300}, version);
    CHECK(status.ok(), version, status.message());
  }
  CHECK(kept.check(others) == int64_t(others.size()));
  CHECK(fs::exists(folder() + "/store/4.seg"));
  kept.erase(lost);
  CHECK(!fs::exists(folder() + "/store/4.seg"));
  Faults::instance().clear();
}

void a_block_that_cannot_be_read_keeps_no_other_from_being_collected() {
  Kept kept(256, int64_t{8} << 20, false);
  const int64_t rows = kept.store->capacity();
  std::vector<int64_t> keys = range(0, rows);
  CHECK(kept.write(keys, 0).ok());
  // Requests of many blocks fail, and of those that are then read one by one the first.
  Faults::instance().inject({FileCall::read, "/4.seg", EIO, 0, 2});
  std::vector<int64_t> others;  // but those of the fourth file, of which there is one request
  const int64_t in_segment = rows / 32;
  for (const int64_t key : keys)
    if (key < 3 * in_segment || key >= 4 * in_segment) others.push_back(key);
  // They are garbage, but for one row of each block, so it is collected next.
  std::vector<int64_t> garbage;
  for (int64_t key = 3 * in_segment; key < 4 * in_segment; ++key)
    if (key % 15 != 0) garbage.push_back(key);
  kept.erase(garbage);
  std::mt19937_64 random(3);
  for (int64_t version = 1; version < 60; ++version) {
    std::shuffle(others.begin(), others.end(), random);
    CHECK(kept.write({others.begin(), others.begin() + 300}, version).ok(), version);
  }
  CHECK(fs::exists(folder() + "/store/4.seg"));
  Faults::instance().clear();
  // What is left of it is one block, with one row.
  fs::resize_file(folder() + "/store/4.seg", 0);
  std::vector<int64_t> left;
  for (int64_t key = 3 * in_segment; key < 4 * in_segment; key += 15) left.push_back(key);
  Status status;
  CHECK(kept.check(left, &status) == int64_t(left.size()) - 1);
}

void a_disk_that_cannot_be_read_for_a_while_is_read_again() {
  Kept kept(256, int64_t{2} << 20, true);
  const int64_t rows = kept.store->capacity();
  std::vector<int64_t> keys = range(0, rows);
  CHECK(kept.write(keys, 0).ok());
  std::mt19937_64 random(3);
  Faults::instance().inject({FileCall::read, ".seg", EIO, 0, int64_t{1} << 40});
  Status status;
  for (int64_t version = 1; version < 200 && status.ok(); ++version) {
    std::shuffle(keys.begin(), keys.end(), random);
    status = kept.write({keys.begin(), keys.begin() + 200}, version);
  }
  CHECK(status.code() == Code::storage && status.message().find("have rows that cannot be read") != std::string::npos,
        status.message());
  Faults::instance().clear();
  for (int64_t version = 200; version < 300; ++version) {
    std::shuffle(keys.begin(), keys.end(), random);
    status = kept.write({keys.begin(), keys.begin() + 200}, version);
    CHECK(status.ok(), version, status.message());
  }
  CHECK(kept.write(keys, 300).ok());
  kept.check_all(rows);
}

void one_key_over_and_over_needs_no_more_than_its_segment() {
  Kept kept(5000, int64_t{1} << 20);
  for (int64_t version = 0; version < 2000; ++version) CHECK(kept.write({7}, version).ok());
  kept.check_all(10);
}

void a_store_that_is_too_small_says_what_it_needs() {
  std::unique_ptr<SsdStore> store;
  const Status status = SsdStore::open({folder() + "/small", 256, 1000}, io(), &store);
  CHECK(status.code() == Code::storage && status.message().find("Raise Ssd(size=)") != std::string::npos);
}

void threads_that_read_and_write_see_whole_rows() {
  Kept kept(300, int64_t{3} << 20);
  constexpr int64_t kKeys = 1500;
  CHECK(kept.write(range(0, kKeys), 0).ok());
  std::atomic<bool> ends{false};
  std::vector<std::thread> threads;
  for (int number = 0; number < 2; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(number);
      std::string bytes(200 * 300, 0);
      bool found[200];
      while (!ends) {
        std::vector<int64_t> keys;
        for (int i = 0; i < 200; ++i) keys.push_back(int64_t(random() % kKeys));
        CHECK(kept.store->read(keys.data(), bytes.data(), found, 200).ok());
        for (size_t i = 0; i < 200; ++i) {
          CHECK(found[i]);
          // The first byte tells the version; all others must be of it.
          const char* const row = bytes.data() + i * 300;
          for (int at = 1; at < 300; ++at) CHECK(row[at] == char(row[0] + at), at);
        }
      }
    });
  }
  for (int64_t version = 1; version < 150; ++version)
    CHECK(kept.write(range(version % 7 * 200, version % 7 * 200 + 300), version).ok());
  ends = true;
  for (std::thread& thread : threads) thread.join();
  kept.check_all(kKeys);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::rows_of_every_size_come_back();
  shoal::it_stays_within_its_files_however_often_rows_are_written();
  shoal::a_row_takes_24_bytes_of_memory_at_most();
  shoal::what_is_cleared_or_closed_leaves_nothing_behind();
  shoal::a_full_disk_loses_nothing();
  shoal::its_bytes_are_those_of_its_files();
  shoal::a_key_that_comes_twice_changes_nothing();
  shoal::of_many_requests_those_that_fail_change_nothing();
  shoal::a_full_store_goes_on_once_calls_do_not_fail_any_more();
  shoal::files_of_dead_segments_are_written_to_again();
  shoal::a_file_that_cannot_be_made_loses_nothing();
  shoal::a_read_that_fails_can_be_made_again();
  shoal::what_the_system_has_no_means_for_is_not_lost();
  shoal::several_stores_are_read_at_a_time_and_a_failure_is_its_own_store_s();
  shoal::a_flipped_bit_is_seen_and_costs_no_other_block();
  shoal::a_cut_file_is_seen();
  shoal::all_that_a_call_cannot_read_is_told_at_once();
  shoal::a_store_that_can_free_nothing_goes_on_once_what_is_lost_is_erased();
  shoal::a_damaged_segment_is_not_collected_away();
  shoal::a_segment_that_cannot_be_read_stops_no_other();
  shoal::a_block_that_cannot_be_read_keeps_no_other_from_being_collected();
  shoal::a_disk_that_cannot_be_read_for_a_while_is_read_again();
  shoal::one_key_over_and_over_needs_no_more_than_its_segment();
  shoal::a_store_that_is_too_small_says_what_it_needs();
  shoal::threads_that_read_and_write_see_whole_rows();
  shoal::threads_that_write_erase_and_read_beside_the_collector_agree();
}
