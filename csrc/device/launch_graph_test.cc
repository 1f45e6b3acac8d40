#include <string>

#include "base/check.h"
#include "device/program.h"

namespace shoal {
namespace {

std::string text_of(const KernelNode& node) {
  return "kernel " + std::to_string(uint64_t(node.function)) + " [" + std::to_string(node.grid[0]) + " " +
         std::to_string(node.grid[1]) + " " + std::to_string(node.grid[2]) + "] " + std::to_string(node.block[0]) +
         " " + std::to_string(node.shared_bytes) + ": " + std::to_string(*static_cast<int64_t*>(node.arguments[0]));
}

std::string text_of(const FillNode& node) {
  return "fill " + std::to_string(node.address) + " " + std::to_string(node.words) + " x " + std::to_string(node.word);
}

std::string text_of(const CopyNode& node) {
  CHECK(node.from.memory == kDeviceMemory && node.to.memory == kHostMemory && node.rows == 1 && node.layers == 1);
  return "copy " + std::to_string(node.bytes) + " from " + std::to_string(node.from.device) + " to " +
         std::to_string(uint64_t(node.to.host));
}

std::string text_of(const void* event) { return "record " + std::to_string(uint64_t(event)); }

// A driver that has at most one graph. Starting it tells what its nodes would do.
struct Fake {
  std::vector<std::string> nodes;
  std::vector<bool> enabled;
  int graphs = 0, made = 0, changes = 0;
  bool capturing = false;
  int adds = 0, sets = 0, starts = 0, alone = 0;  // what these calls answer
  std::string told;
};
Fake fake;

void* handle(size_t number) { return reinterpret_cast<void*>(number); }

// Adds a node that must come after the last one.
int add(void** node, void* const* before, size_t count, const std::string& text) {
  CHECK(count == (fake.nodes.empty() ? 0 : 1) && (count == 0 || *before == handle(fake.nodes.size())), text);
  fake.nodes.push_back(text);
  fake.enabled.push_back(true);
  *node = handle(fake.nodes.size());
  return fake.adds;
}

int change(void* node, const std::string& text) {
  if (fake.sets != 0) return fake.sets;
  ++fake.changes;
  fake.nodes[size_t(node) - 1] = text;
  return 0;
}

int start(void*, void* stream) {
  for (size_t at = 0; at < fake.nodes.size(); ++at) {
    if (fake.enabled[at]) fake.told += fake.nodes[at] + "\n";
  }
  fake.told += "on " + std::to_string(size_t(stream)) + "\n";
  return fake.starts;
}

int create(void** graph, unsigned) {
  CHECK(fake.graphs == 0 && fake.nodes.empty());
  *graph = handle(++fake.graphs);
  ++fake.made;
  return 0;
}

int destroy(void*) {
  --fake.graphs;
  fake.nodes.clear();
  fake.enabled.clear();
  return 0;
}

const GraphDriver graphs = {
    [](void*, int* status) { return *status = fake.capturing, 0; },
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    create,
    [](void** node, void*, void* const* before, size_t count, const KernelNode* kernel) {
      return add(node, before, count, text_of(*kernel));
    },
    [](void** node, void*, void* const* before, size_t count, const FillNode* fill, void* context) {
      CHECK(context == handle(5) && fill->word_bytes == 4 && fill->rows == 1 && fill->words > 0);
      return add(node, before, count, text_of(*fill));
    },
    [](void** node, void*, void* const* before, size_t count, const CopyNode* copy, void* context) {
      CHECK(context == handle(5));
      return add(node, before, count, text_of(*copy));
    },
    [](void** node, void*, void* const* before, size_t count, void* event) {
      return add(node, before, count, text_of(event));
    },
    [](void** started, void*, unsigned long long) { return *started = handle(1), 0; },
    [](void*, void* node, const KernelNode* kernel) {
      CHECK(kernel->grid[0] > 0 && kernel->grid[1] > 0 && kernel->grid[2] > 0);
      return change(node, text_of(*kernel));
    },
    [](void*, void* node, const FillNode* fill, void*) { return change(node, text_of(*fill)); },
    [](void*, void* node, const CopyNode* copy, void*) { return change(node, text_of(*copy)); },
    [](void*, void* node, void* event) { return change(node, text_of(event)); },
    [](void*, void* node, unsigned enabled) { return fake.enabled[size_t(node) - 1] = enabled != 0, 0; },
    start,
    [](void*) { return 0; },
    destroy,
};

int launch_alone(void*, unsigned x, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) {
  fake.told += "alone " + std::to_string(x) + "\n";
  return fake.alone;
}

int fill_alone(unsigned long long, unsigned, size_t, void*) { return 0; }
int copy_alone(void*, unsigned long long, size_t, void*) { return 0; }
int record_alone(void*, void*) { return 0; }
int describe(int, const char** text) { return *text = "out of sorts", 0; }
int get_context(void** context) { return *context = handle(5), 0; }
int set_context(void*) { return 0; }

Program program(const GraphDriver& with = graphs) {
  return Program({get_context, set_context, launch_alone, fill_alone, copy_alone, record_alone, describe, with}, true);
}

void of_one_kernel(Program* it) { it->add_kernel(11, 64, 0, {{{0, 0}, {1, -1}, {1, -1}}}, {{0, 1}}); }

void starts_all_in_order_and_sets_what_changed() {
  fake = {};
  Program it = program();
  it.add_fill({8, 0}, {4, -1}, 7);
  it.add_kernel(11, 64, 96, {{{0, 1}, {2, -1}, {1, -1}}}, {{5, 0}});
  it.add_copy_to_host({0, 2}, {0, 0}, {24, -1});
  it.add_record({0, 3});
  CHECK(it.run(99, {1 << 20, 3, 64, 70}).ok());
  const std::string first =
      "fill 1048584 4 x 7\nkernel 11 [3 2 1] 64 96: 1048581\ncopy 24 from 1048576 to 64\nrecord 70\non 99\n";
  CHECK(fake.told == first && fake.changes == 0, fake.told);
  fake.told.clear();
  CHECK(it.run(99, {1 << 20, 3, 64, 70}).ok());
  CHECK(fake.told == first && fake.changes == 0, fake.told);
  fake.told.clear();
  CHECK(it.run(98, {1 << 20, 4, 128, 71}).ok());
  const std::string then =
      "fill 1048584 4 x 7\nkernel 11 [4 2 1] 64 96: 1048581\ncopy 24 from 1048576 to 128\nrecord 71\non 98\n";
  CHECK(fake.told == then && fake.changes == 3 && fake.made == 1, fake.told);
}

void what_has_no_work_is_left_out_and_comes_back() {
  fake = {};
  Program it = program();
  it.add_fill({8, -1}, {0, 0}, 0);
  it.add_kernel(11, 64, 0, {{{0, 0}, {1, -1}, {1, -1}}}, {{6, -1}});
  CHECK(it.run(1, {0}).ok());
  CHECK(fake.told == "on 1\n", fake.told);
  fake.told.clear();
  CHECK(it.run(1, {2}).ok());
  CHECK(fake.told == "fill 8 2 x 0\nkernel 11 [2 1 1] 64 0: 6\non 1\n", fake.told);
  fake.told.clear();
  CHECK(it.run(1, {0}).ok());
  CHECK(fake.told == "on 1\n", fake.told);
}

void what_cannot_be_changed_is_made_anew() {
  fake = {};
  Program it = program();
  of_one_kernel(&it);
  CHECK(it.run(1, {1, 6}).ok());
  fake.sets = 1;
  CHECK(it.run(1, {1, 7}).ok());
  CHECK(fake.told == "kernel 11 [1 1 1] 64 0: 6\non 1\nkernel 11 [1 1 1] 64 0: 7\non 1\n", fake.told);
  CHECK(fake.made == 2 && fake.graphs == 1);
}

void launches_go_one_by_one_where_there_can_be_no_graph() {
  for (const bool lacking : {true, false}) {
    fake = {};
    fake.adds = 1;
    Program it = program(lacking ? GraphDriver{} : graphs);
    of_one_kernel(&it);
    CHECK(it.run(1, {1, 6}).ok() && it.run(1, {2, 6}).ok());
    CHECK(fake.told == "alone 1\nalone 2\n" && fake.graphs == 0, fake.told);
  }
}

void a_stream_that_is_captured_gets_the_launches_themselves() {
  fake = {};
  Program it = program();
  of_one_kernel(&it);
  fake.capturing = true;
  CHECK(it.run(1, {1, 6}).ok());
  fake.capturing = false;
  CHECK(it.run(1, {2, 6}).ok());
  CHECK(fake.told == "alone 1\nkernel 11 [2 1 1] 64 0: 6\non 1\n", fake.told);
}

void errors_are_told() {
  fake = {};
  Program it = program();
  of_one_kernel(&it);
  fake.starts = 700;
  Status status = it.run(1, {1, 6});
  CHECK(status.code() == Code::device && status.message().find("out of sorts (700)") != std::string::npos);
}

void nothing_is_left_behind() {
  fake = {};
  {
    Program it = program();
    of_one_kernel(&it);
    CHECK(it.run(1, {1, 6}).ok());
    CHECK(fake.graphs == 1);
  }
  CHECK(fake.graphs == 0);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::starts_all_in_order_and_sets_what_changed();
  shoal::what_has_no_work_is_left_out_and_comes_back();
  shoal::what_cannot_be_changed_is_made_anew();
  shoal::launches_go_one_by_one_where_there_can_be_no_graph();
  shoal::a_stream_that_is_captured_gets_the_launches_themselves();
  shoal::errors_are_told();
  shoal::nothing_is_left_behind();
}
