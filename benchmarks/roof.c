/* The roof: what plain C reaches on this machine, so that our own numbers have something absolute to stand next to.
 *
 * A map from int64 keys to row numbers: linear probing over 16-byte slots, 60 % full, in 2 MiB pages. Keys are taken a block
 * at a time: hash and prefetch them all, then probe, so that a block waits for memory once. It cannot grow, erase, or be used
 * while it is written, which is what makes it a roof and not an index.
 *
 * Built by roof.py: cc -O3 -march=native -fopenmp -shared -fPIC roof.c
 */
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BLOCK 32       /* keys in flight at once; 16 to 64 measure alike */
#define AHEAD 1        /* bags whose rows are on their way while one is summed; 20 ids already fill the core's queue of misses */
#define LONGEST_BAG 64
#define LOAD 0.6
#define NO_ROW (-1)

#define LANE 16
typedef float Lane __attribute__((vector_size(LANE * sizeof(float)), aligned(4)));

typedef struct {
  int64_t key, row;
} Slot;

typedef struct {
  Slot *slots;
  uint64_t count;
  void *mapping;
  size_t mapped;
} Map;

static size_t const huge_page = (size_t)2 << 20;

/* Memory on 2 MiB boundaries, for which the kernel is asked to use 2 MiB pages. NULL when there is none. */
void *roof_pages(size_t bytes, void **mapping, size_t *mapped) {
  *mapped = bytes + huge_page;
  *mapping = mmap(NULL, *mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*mapping == MAP_FAILED) return NULL;
  char *start = (char *)(((uintptr_t)*mapping + huge_page - 1) / huge_page * huge_page);
  madvise(start, bytes, MADV_HUGEPAGE);
  return start;
}

void roof_unmap(void *mapping, size_t mapped) { munmap(mapping, mapped); }

static inline uint64_t home(Map const *map, int64_t key) {
  uint64_t h = (uint64_t)key * 0x9fb21c651e98df25u;
  h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
  h ^= h >> 29;
  return (uint64_t)(((__uint128_t)h * map->count) >> 64);
}

static inline int64_t probe(Map const *map, int64_t key, uint64_t at) {
  for (;; at = at + 1 == map->count ? 0 : at + 1) {
    Slot const slot = map->slots[at];
    if (slot.row == NO_ROW || slot.key == key) return slot.row;
  }
}

Map *roof_new(int64_t keys) {
  Map *map = malloc(sizeof *map);
  if (!map) return NULL;
  map->count = (uint64_t)(keys / LOAD) + 1;
  map->slots = roof_pages(map->count * sizeof(Slot), &map->mapping, &map->mapped);
  if (!map->slots) {
    free(map);
    return NULL;
  }
  memset(map->slots, 0xff, map->count * sizeof(Slot)); /* every row NO_ROW */
  return map;
}

void roof_free(Map *map) {
  roof_unmap(map->mapping, map->mapped);
  free(map);
}

/* Keys must be new and within what roof_new was told; the i-th gets row first + i. */
void roof_insert(Map *map, int64_t const *keys, int64_t n, int64_t first) {
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t const size = n - start < BLOCK ? n - start : BLOCK;
    uint64_t at[BLOCK];
    for (int64_t i = 0; i < size; i++) {
      at[i] = home(map, keys[start + i]);
      __builtin_prefetch(&map->slots[at[i]], 1);
    }
    for (int64_t i = 0; i < size; i++) {
      uint64_t here = at[i];
      while (map->slots[here].row != NO_ROW) here = here + 1 == map->count ? 0 : here + 1;
      map->slots[here] = (Slot){keys[start + i], first + start + i};
    }
  }
}

void roof_find(Map const *map, int64_t const *keys, int64_t n, int64_t *rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t const size = n - start < BLOCK ? n - start : BLOCK;
    uint64_t at[BLOCK];
    for (int64_t i = 0; i < size; i++) {
      at[i] = home(map, keys[start + i]);
      __builtin_prefetch(&map->slots[at[i]]);
    }
    for (int64_t i = 0; i < size; i++) rows[start + i] = probe(map, keys[start + i], at[i]);
  }
}

/* One table's bags [from, to), summed into out[b * stride]. With a map, names are keys; without, they are row numbers.
 * Three stages a few bags apart: hash and prefetch the slot; probe and prefetch the row; sum. */
static inline __attribute__((always_inline)) void sum_bags(Map const *map, float const *table, int64_t const *names, int64_t from,
                                                          int64_t to, int64_t length, int64_t dim, float *out, int64_t stride) {
  enum { RING = 2 * AHEAD + 1 };
  uint64_t at[RING][LONGEST_BAG];
  int64_t row[RING][LONGEST_BAG];
  for (int64_t b = from; b < to + 2 * AHEAD; b++) {
    if (b < to && map)
      for (int64_t i = 0; i < length; i++) {
        at[b % RING][i] = home(map, names[b * length + i]);
        __builtin_prefetch(&map->slots[at[b % RING][i]]);
      }
    int64_t const found = b - AHEAD;
    if (found >= from && found < to)
      for (int64_t i = 0; i < length; i++) {
        int64_t const name = names[found * length + i];
        int64_t const r = map ? probe(map, name, at[found % RING][i]) : name;
        row[found % RING][i] = r;
        for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(table + r * dim + d);
      }
    int64_t const summed = b - 2 * AHEAD;
    if (summed < from) continue;
    Lane sum[128 / LANE] = {0};
    for (int64_t i = 0; i < length; i++) {
      Lane const *values = (Lane const *)(table + row[summed % RING][i] * dim);
#pragma GCC unroll 8
      for (int64_t d = 0; d < dim / LANE; d++) sum[d] += values[d];
    }
    memcpy(out + summed * stride, sum, dim * sizeof(float));
  }
}

/* names: [tables, bags, length]; out: [bags, tables * dim]. maps is NULL when names are row numbers. Returns 0, or -1 for a
 * dim that is not 32, 64 or 128 (the sums live in registers) or a bag too long. */
int roof_bags(Map *const *maps, float *const *rows, int64_t tables, int64_t bags, int64_t length, int64_t dim, int64_t const *names,
              float *out, int threads) {
  if ((dim != 32 && dim != 64 && dim != 128) || length > LONGEST_BAG) return -1;
  int64_t const chunk = 64, chunks = (bags + chunk - 1) / chunk;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c = 0; c < tables * chunks; c++) {
    int64_t const t = c / chunks, from = c % chunks * chunk, to = from + chunk < bags ? from + chunk : bags;
    Map const *map = maps ? maps[t] : NULL;
    int64_t const *mine = names + t * bags * length;
    float *to_out = out + t * dim;
    if (dim == 32) sum_bags(map, rows[t], mine, from, to, length, 32, to_out, tables * 32);
    else if (dim == 64) sum_bags(map, rows[t], mine, from, to, length, 64, to_out, tables * 64);
    else sum_bags(map, rows[t], mine, from, to, length, 128, to_out, tables * 128);
  }
  return 0;
}

/* Nanoseconds until a line that one core has written is at another: two threads write one number in turn. Where it takes
 * long, the two cores share no cache. Negative where there are no two threads. */
double roof_transfer(int64_t rounds) {
  _Alignas(64) _Atomic int64_t line = 0;
  double began = 0, ended = -1;
  int threads = 1;
#pragma omp parallel num_threads(2)
  {
    int64_t const mine = omp_get_thread_num();
#pragma omp single
    threads = omp_get_num_threads();
    if (threads == 2) {
      if (mine == 0) began = omp_get_wtime();
      for (int64_t turn = mine; turn < 2 * rounds; turn += 2) {
        for (int64_t spins = 0; atomic_load_explicit(&line, memory_order_acquire) != turn; spins++)
          if (spins > 100000) sched_yield(); /* the other is not running */
        atomic_store_explicit(&line, turn + 1, memory_order_release);
      }
      if (mine == 0) ended = omp_get_wtime();
    }
  }
  return threads == 2 ? (ended - began) * 1e9 / (double)(2 * rounds) : -1;
}

/* Bytes a second at which rows of `width` floats, named by `names`, are read from a table and added up. */
double roof_read(float const *table, int64_t const *names, int64_t n, int64_t width, int threads) {
  double const began = omp_get_wtime();
  double total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t const size = n - start < BLOCK ? n - start : BLOCK;
    for (int64_t i = 0; start + BLOCK + i < n && i < BLOCK; i++)
      for (int64_t d = 0; d < width; d += LANE) __builtin_prefetch(table + names[start + BLOCK + i] * width + d);
    Lane sum = {0};
    for (int64_t i = 0; i < size; i++) {
      Lane const *values = (Lane const *)(table + names[start + i] * width);
      for (int64_t d = 0; d < width / LANE; d++) sum += values[d];
    }
    for (int d = 0; d < LANE; d++) total += sum[d];
  }
  double const seconds = omp_get_wtime() - began;
  return total == 0.12345 ? 0 : (double)(n * width) * sizeof(float) / seconds;
}
