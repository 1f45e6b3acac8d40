#include "kernels/sums.h"
#include "kernels/vec.h"

namespace shoal {
using namespace SHOAL_ISA;
namespace {

// The numbers of slots, in order of their first appearance.
class Numbers {
 public:
  explicit Numbers(const SumRoom& room) : room_(room) { clear(); }

  int64_t count() const { return count_; }

  // Where slots are looked for. A copy in registers: what is written meanwhile might be this, for all that a compiler knows.
  struct Places {
    const uint64_t* at;
    uint32_t mask;
    int shift;

    // slot << 32 | number, or kFree, and the place where it is, or would be.
    SHOAL_INLINE uint64_t find(uint32_t slot, uint32_t* place) const {
      for (*place = spread(slot) >> shift;; *place = (*place + 1) & mask) {
        const uint64_t found = at[*place];
        if (static_cast<uint32_t>(found >> 32) == slot || found == kFree) return found;
      }
    }
  };
  Places places() const { return {room_.places, mask_, shift_}; }

  static constexpr uint64_t kFree = ~uint64_t{0};

  // The next number, for a slot whose place is free. What places() returned before is out of date.
  uint32_t add(uint32_t slot, uint32_t place) {
    const uint64_t row = static_cast<uint64_t>(slot) << 32 | static_cast<uint64_t>(count_);
    room_.rows[count_] = room_.places[place] = row;
    if (kSumPlaces * static_cast<uint64_t>(++count_) > mask_) grow();
    return static_cast<uint32_t>(row);
  }

 private:
  void clear() {
    for (uint32_t place = 0; place <= mask_; ++place) room_.places[place] = kFree;
  }
  // Few rows lie in few lines: the places grow with them.
  void grow() {
    mask_ = 2 * mask_ + 1;
    --shift_;
    clear();
    for (int64_t i = 0; i < count_; ++i) {
      uint32_t place = spread(static_cast<uint32_t>(room_.rows[i] >> 32)) >> shift_;
      while (room_.places[place] != kFree) place = (place + 1) & mask_;
      room_.places[place] = room_.rows[i];
    }
  }

  const SumRoom& room_;
  uint32_t mask_ = 1023;
  int shift_ = 22;
  int64_t count_ = 0;
};

// The rows of a part, their numbers and their sums.
template <int Dim>
class Sums {
 public:
  Sums(const UpdatePart& part, const Bags& bags, SlotRange range, const SumRoom& room)
      : part_(part), bags_(bags), range_(range), room_(room), numbers_(room) {}

  int64_t count() const { return numbers_.count(); }

  void add(const GradientRow& in) {
    const UpdateFeature& feature = *in.feature;
    const uint32_t* slots = bags_.slots_of(feature.slot_list);
    const int64_t first = feature.source * bags_.batch;
    const bool each = feature.pooling == Pooling::none;
    uint32_t named[kTogether];
    int64_t mapped = in.begin, base = in.begin;  // positions [base, mapped) have their numbers
    for (int64_t bag = 0, at = in.begin; bag < bags_.batch; ++bag) {
      const int64_t from = at, to = bags_.offset(first + bag + 1);
      const float* gradient = feature.grad + (each ? from - in.begin : bag) * feature.stride;
      const float mean = feature.pooling == Pooling::mean ? static_cast<float>(to - from) : 1.0f;
      while (at < to) {
        if (at == mapped) {
          base = mapped;
          mapped = in.end - base < kTogether ? in.end : base + kTogether;
          name(slots, base, mapped, named);
        }
        const int64_t stop = to < mapped ? to : mapped;
        if (!each && !bags_.weights) {
          add_to_all(named + (at - base), stop - at, gradient, part_.table->grad_scale / mean);
          at = stop;
        }
        for (; at < stop; ++at, gradient += each ? feature.stride : 0) {
          const float weight = bags_.weights ? bags_.weights[at] : 1.0f;
          add_to_all(named + (at - base), 1, gradient, part_.table->grad_scale * weight / mean);
        }
      }
    }
  }

 private:
  static constexpr int64_t kTogether = 512;
  static constexpr uint32_t kNobody = ~uint32_t{0};

  SHOAL_INLINE int32_t dim() const { return Dim ? Dim : part_.table->rows->dim; }

  // The numbers of the rows of some positions; kNobody for those that are none of this part's.
  void name(const uint32_t* slots, int64_t from, int64_t to, uint32_t* named) {
    Numbers::Places places = numbers_.places();
    const SlotRange range = range_;
    for (int64_t at = from; at < to; ++at) {
      const uint32_t slot = slots[at];
      uint32_t number = kNobody, place;
      if (slot != kNoSlot && static_cast<uint64_t>(slot) >> range.shift == range.number) {
        const uint64_t found = places.find(slot, &place);
        number = static_cast<uint32_t>(found);
        if (found == Numbers::kFree) {
          number = begin_row(slot, place, at);
          places = numbers_.places();
        }
      }
      named[at - from] = number;
    }
  }
  __attribute__((noinline)) uint32_t begin_row(uint32_t slot, uint32_t place, int64_t at) {
    const uint32_t number = numbers_.add(slot, place);
    room_.first[number] = static_cast<uint32_t>(at);
    // It begins at -0, as -0 + x is x for every x, also for zeros.
    float* sum = room_.sums + static_cast<int64_t>(number) * dim();
    int32_t d = 0;
    for (; d + kLanes <= dim(); d += kLanes) store16(sum + d, -f32x16{});
    for (; d < dim(); ++d) sum[d] = -0.0f;
    return number;
  }
  // The sums of these rows += scale * gradient.
  SHOAL_INLINE void add_to_all(const uint32_t* named, int64_t n, const float* gradient, float scale) {
    if constexpr (Dim > 0) {
      f32x16 scaled[Dim / kLanes];
      for (int v = 0; v < Dim / kLanes; ++v) scaled[v] = scale * load16(gradient + kLanes * v);
      float* sums = room_.sums;
      for (int64_t i = 0; i < n; ++i) {
        if (named[i] == kNobody) continue;
        float* sum = sums + static_cast<int64_t>(named[i]) * Dim;
        for (int v = 0; v < Dim / kLanes; ++v) store16(sum + kLanes * v, load16(sum + kLanes * v) + scaled[v]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        if (named[i] == kNobody) continue;
        float* sum = room_.sums + static_cast<int64_t>(named[i]) * dim();
        for (int32_t d = 0; d < dim(); ++d) sum[d] += scale * gradient[d];
      }
    }
  }

  const UpdatePart& part_;
  const Bags& bags_;
  const SlotRange range_;
  const SumRoom& room_;
  Numbers numbers_;
};

template <int Dim>
int64_t run(const UpdatePart& part, const Bags& bags, SlotRange range, const SumRoom& room) {
  Sums<Dim> sums(part, bags, range, room);
  for (int64_t f = 0; f < part.feature_count; ++f) sums.add(part.features[f]);
  return sums.count();
}

int64_t run_any(const UpdatePart& part, const Bags& bags, SlotRange range, const SumRoom& room) {
  switch (part.table->rows->dim) {
    case 16: return run<16>(part, bags, range, room);
    case 32: return run<32>(part, bags, range, room);
    case 48: return run<48>(part, bags, range, room);
    case 64: return run<64>(part, bags, range, room);
    case 96: return run<96>(part, bags, range, room);
    case 128: return run<128>(part, bags, range, room);
    default: return run<0>(part, bags, range, room);
  }
}

}  // namespace

extern const SumKernel SHOAL_ISA_TABLE(sum_kernel);
const SumKernel SHOAL_ISA_TABLE(sum_kernel) = {run_any};

}  // namespace shoal
