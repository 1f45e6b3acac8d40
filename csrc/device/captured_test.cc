#include "device/captured.h"

#include <string>

#include "base/check.h"

namespace shoal {
namespace {

struct Fake {
  int streams = 0, graphs = 0, started = 0;
  bool capturing = false;
  int begins = 0, ends = 0, instantiates = 0, launches = 0;  // what these calls answer
  std::string told;
};
Fake fake;

void* handle(size_t number) { return reinterpret_cast<void*>(number); }

Driver driver() {
  Driver made;
  made.describe = [](int, const char** text) { return *text = "out of sorts", 0; };
  made.graphs.create_stream = [](void** stream, unsigned flags) {
    CHECK(flags == kStreamApart);
    ++fake.streams;
    return *stream = handle(77), 0;
  };
  made.graphs.destroy_stream = [](void*) { return --fake.streams, 0; };
  made.graphs.begin_capture = [](void* stream, int mode) {
    CHECK(stream == handle(77) && mode == kCaptureRelaxed && !fake.capturing);
    fake.capturing = fake.begins == 0;
    return fake.begins;
  };
  made.graphs.end_capture = [](void*, void** graph) {
    CHECK(fake.capturing);
    fake.capturing = false;
    if (fake.ends == 0) *graph = handle(size_t(++fake.graphs));
    return fake.ends;
  };
  made.graphs.instantiate = [](void** started, void*, unsigned long long) {
    if (fake.instantiates == 0) *started = handle(size_t(++fake.started));
    return fake.instantiates;
  };
  made.graphs.launch = [](void*, void* stream) {
    fake.told += "start on " + std::to_string(size_t(stream)) + "\n";
    return fake.launches;
  };
  made.graphs.destroy_started = [](void*) { return --fake.started, 0; };
  made.graphs.destroy = [](void*) { return --fake.graphs, 0; };
  return made;
}

void what_is_captured_can_be_started() {
  fake = {};
  {
    std::unique_ptr<CaptureStream> stream;
    CHECK(CaptureStream::make(driver(), &stream).ok() && stream->handle() == 77);
    std::unique_ptr<CapturedGraph> graph;
    CHECK(stream->capture([] { return fake.told += "work\n", Status(); }, &graph).ok());
    CHECK(graph->start(5).ok() && graph->start(6).ok());
    CHECK(fake.told == "work\nstart on 5\nstart on 6\n", fake.told);
    fake.launches = 700;
    CHECK(graph->start(5).message().find("out of sorts (700)") != std::string::npos);
  }
  CHECK(fake.streams == 0 && fake.graphs == 0 && fake.started == 0);
}

void what_fails_leaves_the_stream_as_it_was() {
  fake = {};
  std::unique_ptr<CaptureStream> stream;
  CHECK(CaptureStream::make(driver(), &stream).ok());
  std::unique_ptr<CapturedGraph> graph;
  const auto works = [] { return Status(); };
  CHECK(stream->capture([] { return Status(Code::memory, "none left"); }, &graph).code() == Code::memory);
  for (int Fake::* call : {&Fake::begins, &Fake::ends, &Fake::instantiates}) {
    fake.*call = 1;
    CHECK(stream->capture(works, &graph).code() == Code::device);
    fake.*call = 0;
    CHECK(!fake.capturing && graph == nullptr && fake.graphs == 0 && fake.started == 0);
  }
  CHECK(stream->capture(works, &graph).ok() && graph != nullptr);
}

void a_driver_without_graphs_says_so() {
  std::unique_ptr<CaptureStream> stream;
  CHECK(CaptureStream::make(Driver{}, &stream).code() == Code::device && stream == nullptr);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::what_is_captured_can_be_started();
  shoal::what_fails_leaves_the_stream_as_it_was();
  shoal::a_driver_without_graphs_says_so();
}
