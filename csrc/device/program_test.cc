#include "device/program.h"

#include <string>

#include "base/check.h"

namespace shoal {
namespace {

// What a driver was told. Kernels here have three arguments: an address, a number of 32 bits and one of 64.
struct Told {
  std::string text;
  int answer = 0;
};
Told told;

int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared,
           void* stream, void** arguments, void**) {
  int32_t narrow = *static_cast<int32_t*>(arguments[1]);
  told.text += "kernel " + std::to_string(uint64_t(function)) + " [" + std::to_string(x) + " " + std::to_string(y) +
               " " + std::to_string(z) + "] " + std::to_string(threads) + " " + std::to_string(shared) + " on " +
               std::to_string(uint64_t(stream)) + ": " + std::to_string(*static_cast<int64_t*>(arguments[0])) + " " +
               std::to_string(narrow) + " " + std::to_string(*static_cast<int64_t*>(arguments[2])) + "\n";
  return told.answer;
}

int fill(unsigned long long address, unsigned word, size_t words, void*) {
  told.text += "fill " + std::to_string(address) + " " + std::to_string(words) + " x " + std::to_string(word) + "\n";
  return told.answer;
}

int copy_to_host(void* to, unsigned long long from, size_t bytes, void*) {
  told.text +=
      "copy " + std::to_string(bytes) + " from " + std::to_string(from) + " to " + std::to_string(uint64_t(to)) + "\n";
  return told.answer;
}

int record(void* event, void* stream) {
  told.text += "record " + std::to_string(uint64_t(event)) + " on " + std::to_string(uint64_t(stream)) + "\n";
  return told.answer;
}

int describe(int, const char** text) {
  *text = "out of sorts";
  return 0;
}

// Of the thread.
void* context = reinterpret_cast<void*>(9);

int get_context(void** to) { return *to = context, 0; }
int set_context(void* to) { return context = to, 0; }

Program program() { return Program({get_context, set_context, launch, fill, copy_to_host, record, describe, {}}); }

void launches_in_order_with_fixed_and_given_numbers() {
  Program it = program();
  it.add_fill({8, 0}, {4, -1}, 7);
  it.add_kernel(11, 64, 96, {{{0, 1}, {2, -1}, {1, -1}}}, {{0, 0}, {-5, -1}, {16, 0}});
  it.add_kernel(12, 32, 0, {{{1, -1}, {1, -1}, {1, -1}}}, {{1, -1}, {0, 1}, {-1, -1}});
  it.add_copy_to_host({64, -1}, {0, 0}, {24, -1});
  it.add_record({0, 1});
  told = {};
  CHECK(it.run(99, {int64_t{1} << 40, 3}).ok());
  const std::string wanted =
      "fill 1099511627784 4 x 7\n"
      "kernel 11 [3 2 1] 64 96 on 99: 1099511627776 -5 1099511627792\n"
      "kernel 12 [1 1 1] 32 0 on 99: 1 3 -1\n"
      "copy 24 from 1099511627776 to 64\n"
      "record 3 on 99\n";
  CHECK(told.text == wanted, told.text);
}

void what_has_no_work_is_left_out() {
  Program it = program();
  it.add_fill({8, -1}, {0, 0}, 0);
  it.add_kernel(11, 64, 0, {{{0, 0}, {1, -1}, {1, -1}}}, {{0, -1}, {0, -1}, {0, -1}});
  told = {};
  CHECK(it.run(1, {0}).ok());
  CHECK(told.text.empty(), told.text);
}

void too_few_variables_launch_nothing() {
  Program it = program();
  it.add_kernel(11, 64, 0, {{{1, -1}, {1, -1}, {1, -1}}}, {{0, -1}, {0, 4}, {0, -1}});
  told = {};
  Status status = it.run(1, {1, 2, 3, 4});
  CHECK(status.code() == Code::device && told.text.empty(), told.text);
  CHECK(status.message().find("wants 5 variables; got 4") != std::string::npos, status.message());
}

void a_refused_launch_is_the_last_one() {
  Program it = program();
  it.add_fill({8, -1}, {4, -1}, 0);
  it.add_fill({9, -1}, {4, -1}, 0);
  told = {"", 700};
  Status status = it.run(1, {});
  CHECK(status.code() == Code::device && told.text == "fill 8 4 x 0\n", told.text);
  CHECK(status.message().find("out of sorts (700)") != std::string::npos, status.message());
}

void a_thread_without_a_context_gets_that_of_the_kernels() {
  Program it = program();
  it.add_fill({8, -1}, {4, -1}, 0);
  CHECK(it.run(1, {}).ok());
  context = nullptr;
  CHECK(it.run(1, {}).ok());
  CHECK(context == reinterpret_cast<void*>(9));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::a_thread_without_a_context_gets_that_of_the_kernels();
  shoal::launches_in_order_with_fixed_and_given_numbers();
  shoal::what_has_no_work_is_left_out();
  shoal::too_few_variables_launch_nothing();
  shoal::a_refused_launch_is_the_last_one();
}
