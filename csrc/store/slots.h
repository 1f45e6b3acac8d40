// Maps a key to the slot of its row on disk.
//
// Keys lie in buckets, buckets in parts of 32 KiB. A part that is full is split in two by the next bit of its keys' hashes,
// so each key moves about once, whatever the index grows to. Parts that are equally full would all be split at once,
// and be half empty afterwards; so hashes are spread over sections of unequal shares, of which only one at a time
// reaches that point. Erases reverse this: two halves whose keys fit into one part become one, the last part moves to
// the place of the other, and pages after it go back to the system.
//
// At any moment, growing or shrinking, the index takes at most 24 bytes a key, plus 64 KiB, or plus 4 MiB once it has
// more than 32 MiB: erased keys leave a page that is partly used and one that is kept for growth. A caller that could
// choose which keys to erase by their hashes could keep parts apart that are almost empty.
//
// Thread safety: const methods may run concurrently; the others need exclusive use.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "base/rows.h"
#include "base/status.h"
#include "index/bucket.h"

namespace shoal {

class SlotIndex {
 public:
  SlotIndex() = default;
  ~SlotIndex();
  SlotIndex(const SlotIndex&) = delete;
  SlotIndex& operator=(const SlotIndex&) = delete;

  int64_t size() const;
  // With pages that are kept for growth.
  int64_t bytes() const;

  // Writes kNoSlot for a key that has none.
  void find(const int64_t* keys, uint32_t* slots, int64_t n) const;

  // Gives key i the slot first + i, and tells in had[i] which one it had. Where `from` is not null only keys that have
  // the slot from[i] get theirs. had[i] is first + i itself for a key that did not get it: where from[i] was not its slot,
  // or, with an error, where there is no memory to put a new key in. REQUIRES: the keys differ from each other.
  Status put(const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from, uint32_t* had);

  // The slot the key had, or kNoSlot.
  uint32_t erase(int64_t key);
  std::vector<int64_t> keys() const;

 private:
  struct Part {
    Bucket* buckets = nullptr;
    uint32_t number = 0;  // of its place in the pages
    uint32_t prefix = 0;  // the bits that the hashes of its keys have in common, after those that choose the section
    uint32_t size = 0;
    uint16_t depth = 0;  // how many bits these are
    uint16_t mask = 0;   // the number of buckets, which is a power of two, less one

    bool has_room() const;
    Bucket& home(uint64_t hash) const { return buckets[hash & mask]; }
    // Returns where the key's slot is; null if it has none.
    uint32_t* locate(uint64_t hash, int64_t key) const;
    // REQUIRES: the key is absent, and there is room.
    void place(uint64_t hash, int64_t key, uint32_t slot);
    uint32_t erase(uint64_t hash, int64_t key);
  };
  // On cache lines of its own: threads count in different sections at the same time.
  struct alignas(128) Section {
    std::vector<Part> parts;
    std::vector<uint32_t> which = {};  // part, by the first `depth` bits of a hash
    uint32_t depth = 0;
    int64_t size = 0;
    int64_t bucket_bytes = 0;

    Part& part_of(uint64_t hash) { return parts[which[number_of(hash)]]; }
    const Part& part_of(uint64_t hash) const { return parts[which[number_of(hash)]]; }
    size_t number_of(uint64_t hash) const;
    // Of a part, in `which`.
    size_t places(const Part& part) const { return size_t{1} << (depth - part.depth); }
    size_t first_place(const Part& part) const { return size_t{part.prefix} << (depth - part.depth); }
  };
  static constexpr int kSections = 16;
  struct Owner {
    uint32_t section, part;
  };

  static int section_of(uint64_t hash);
  Status put_some(int thread, const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from, uint32_t* had);
  Status make_room(Section* section, uint64_t hash);
  Status begin(Section* section);
  // The part of a hash.
  Status split(Section* section, uint64_t hash);
  // Puts all keys of a part where they belong: into it, which has so many buckets less one from now on, or into `other`
  // if the bit of their hash that tells is set.
  static void deal_out(Part* part, uint16_t mask, Part* other);
  // The next part of the section gets its place.
  Status take_buckets(const Section& section, Part* part);

  // Frees what a part that lost keys does not need.
  void shrink(Section* section, uint64_t hash);
  // A part and the one it was split from become one; false where they would not fit, or are not both whole.
  bool merge(Section* section, uint64_t hash);
  void remove(Section* section, uint32_t number);
  void shrink_lists(Section* section);
  // The last part moves to this place, and its own is free.
  void give_buckets(uint32_t number);
  // These buckets of a place are empty now; their memory goes back to the system where that matters.
  void clear_buckets(uint32_t number, uint32_t from);
  Bucket* place_of(uint32_t number) const;

  // Makes pages resident before they are needed, so that a write need not wait for them.
  void prepare_growth();

  std::array<Section, kSections> sections_;
  std::mutex mutex_;  // covers what is below while keys are put
  std::vector<Pages> pages_;
  std::vector<Owner> owners_;  // of the places in the pages that are taken, which are the first ones
  int64_t pages_ahead_ = 0;
};

}  // namespace shoal
