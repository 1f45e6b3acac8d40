#include "base/file.h"

#include <nanobind/operators.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <unistd.h>

#include <filesystem>

#include "base/crc32c.h"
#include "base/faults.h"
#include "base/file_lock.h"
#include "base/file_reader.h"
#include "base/file_writer.h"
#include "bind/bind.h"

namespace shoal {

// Bytes of a Python object: anything contiguous with the buffer protocol, or a tensor on the CPU. Never a copy.
template <typename Byte>
class Bytes {
 public:
  Bytes() = default;
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }

  bool take(nb::handle source) {
    constexpr bool writes = !std::is_const_v<Byte>;
    if (PyObject_CheckBuffer(source.ptr())) {
      if (PyObject_GetBuffer(source.ptr(), &buffer_, writes ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) return true;
      PyErr_Clear();
      buffer_.obj = nullptr;
      return false;
    }
    return nb::try_cast(nb::borrow(source), tensor_, false);
  }
  Byte* data() const { return static_cast<Byte*>(buffer_.obj != nullptr ? buffer_.buf : tensor_.data()); }
  int64_t size() const { return buffer_.obj != nullptr ? int64_t(buffer_.len) : int64_t(tensor_.nbytes()); }

 private:
  using Access = std::conditional_t<std::is_const_v<Byte>, nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>,
                                    nb::ndarray<nb::c_contig, nb::device::cpu>>;
  Py_buffer buffer_ = {};
  Access tensor_;
};
using Given = Bytes<const void>;
using Wanted = Bytes<void>;

using Path = std::filesystem::path;

static constexpr int64_t kCheckedTogether = int64_t{256} << 10;

}  // namespace shoal

namespace nanobind::detail {

template <typename Byte>
struct type_caster<shoal::Bytes<Byte>> {
  using Value = shoal::Bytes<Byte>;
  static constexpr auto Name = const_name("typing_extensions.Buffer | torch.Tensor");
  template <typename T>
  using Cast = Value&;
  template <typename T>
  static constexpr bool can_cast() {
    return true;
  }
  explicit operator Value&() { return value; }
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    try {
      return value.take(source);
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }
  Value value;
};

}  // namespace nanobind::detail

namespace shoal {

// Makes the call with the GIL released.
template <typename Call>
static void make(const Call& call) {
  Status status;
  {
    nb::gil_scoped_release released;
    status = call();
  }
  raise(status);
}

// A forked child has none of its threads.
template <typename T>
static std::shared_ptr<T> of_this_process(std::unique_ptr<T> made) {
  return std::shared_ptr<T>(made.release(), [maker = ::getpid()](T* object) {
    if (::getpid() != maker) return;
    nb::gil_scoped_release released;
    delete object;
  });
}

// A file's name is any bytes; Python has a str for each.
static nb::str to_str(const std::string& name) {
  PyObject* const made = PyUnicode_DecodeFSDefaultAndSize(name.data(), Py_ssize_t(name.size()));
  if (made == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(made);
}

using Opener = Status (*)(const FilePath&, bool, FileOwner, File*);

template <Opener opener>
static File open_file(const FilePath& path, FileOwner owner) {
  File file;
  make([&] { return opener(path, false, owner, &file); });
  return file;
}

static const nb::sig kExit("def __exit__(self, *args: object) -> None");

static void bind_paths(nb::module_& m) {
  nb::class_<FilePath>(m, "FilePath",
                       "What the user named, in which links lead on, and what is below it, in which none does")
      .def(nb::init<const FilePath&>(), nb::arg("path"))
      .def(
          "__init__", [](FilePath* self, const Path& root) { new (self) FilePath(root.string()); }, nb::arg("root"))
      .def_prop_ro("root", [](const FilePath& path) { return to_str(path.root()); })
      .def_prop_ro(
          "below", [](const FilePath& path) { return to_str(path.below()); }, "Names with slashes between them")
      .def_prop_ro("name", [](const FilePath& path) { return to_str(path.name()); })
      .def_prop_ro("parent", &FilePath::parent)
      .def(
          "absolute",
          [](const FilePath& path) { return FilePath(std::filesystem::absolute(path.root()).string(), path.below()); },
          "The same when the process changes its folder")
      .def(
          "with_name", [](const FilePath& path, const Path& name) { return path.with_name(name.string()); },
          nb::arg("name"))
      .def(
          "__truediv__", [](const FilePath& path, const Path& name) { return path / name.string(); }, nb::arg("name"),
          "The path of that name, or of several with slashes between them, below this one")
      .def("__str__", [](const FilePath& path) { return to_str(path.string()); })
      .def("__fspath__", [](const FilePath& path) { return to_str(path.string()); })
      .def("__repr__",
           [](const FilePath& path) {
             return nb::str("FilePath({!r}, {!r})").format(to_str(path.root()), to_str(path.below()));
           })
      .def("__hash__", [](const FilePath& path) { return std::hash<std::string>()(path.string()); })
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"));
  nb::implicitly_convertible<Path, FilePath>();
  nb::enum_<FileKind>(m, "FileKind", "Other: a pipe, a socket or a device")
      .value("file", FileKind::file)
      .value("folder", FileKind::folder)
      .value("link", FileKind::link)
      .value("other", FileKind::other);
  nb::class_<FileEntry>(m, "FileEntry")
      .def_ro("kind", &FileEntry::kind)
      .def_ro("owner", &FileEntry::owner, "The user's number")
      .def_ro("disk_bytes", &FileEntry::disk_bytes, "That it has there: holes have none");
}

static void bind_files(nb::module_& m) {
  nb::class_<File>(m, "File", "Reads and writes at offsets, through the page cache")
      .def_static("open_to_read", &open_file<File::open_to_read>, nb::arg("path"), nb::arg("owner") = FileOwner::log)
      .def_static("open_to_write", &open_file<File::open_to_write>, nb::arg("path"), nb::arg("owner") = FileOwner::log,
                  "As it is, made if there is none")
      .def_static("create_new", &open_file<File::create_new>, nb::arg("path"), nb::arg("owner") = FileOwner::log,
                  "An error if there is one")
      .def_prop_ro("path", [](const File& file) { return to_str(file.path()); })
      .def_prop_ro("is_open", &File::is_open)
      .def_prop_ro(
          "is_in_place", [](const File& file) { return file.is_open() && file.is_in_place(); },
          "Whether its path still leads to it")
      .def(
          "read",
          [](const File& file, int64_t offset, Wanted& out) {
            make([&] { return file.read(out.data(), out.size(), offset); });
          },
          nb::arg("offset"), nb::arg("out"), "All of the bytes, or an error")
      .def(
          "write",
          [](const File& file, int64_t offset, Given& data) {
            make([&] { return file.write(data.data(), data.size(), offset); });
          },
          nb::arg("offset"), nb::arg("data"))
      .def("size",
           [](const File& file) {
             int64_t bytes = 0;
             make([&] { return file.size(&bytes); });
             return bytes;
           })
      .def(
          "next_data",
          [](const File& file, int64_t offset) {
            int64_t at = 0;
            make([&] { return file.next_data(offset, &at); });
            return at;
          },
          nb::arg("offset"), "The first place from there on that is no hole; the file's end where there is none")
      .def(
          "truncate", [](const File& file, int64_t bytes) { make([&] { return file.truncate(bytes); }); },
          nb::arg("bytes"))
      .def(
          "sync", [](const File& file) { make([&] { return file.sync(); }); }, "What was written is on the disk")
      .def("close", &File::close, "No other call may run at the same time")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> File"))
      .def("__exit__", [](File& file, nb::args) { file.close(); }, kExit);

  nb::class_<FileLock>(m, "FileLock", "Held by one process until it is released or the process ends")
      .def_static(
          "take",
          [](const FilePath& path, const std::string& word, FileOwner owner, bool wait) {
            FileLock lock;
            make([&] { return FileLock::take(path, word, owner, &lock, wait); });
            return lock;
          },
          nb::arg("path"), nb::arg("word"), nb::arg("owner") = FileOwner::log, nb::arg("wait") = false)
      .def_prop_ro("path", [](const FileLock& lock) { return to_str(lock.path()); })
      .def_prop_ro("is_held", &FileLock::is_held, "False in a forked child")
      .def_prop_ro("is_in_place", &FileLock::is_in_place, "Held, and its path still leads to it")
      .def("release", &FileLock::release)
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> FileLock"))
      .def("__exit__", [](FileLock& lock, nb::args) { lock.release(); }, kExit);
}

static void bind_streams(nb::module_& m) {
  nb::class_<FileWriter>(m, "FileWriter", "Writes a large new file in the background, from beginning to end")
      .def_static(
          "create",
          [](const FilePath& path, bool direct, FileOwner owner) {
            std::unique_ptr<FileWriter> writer;
            make([&] { return FileWriter::create(path, direct, owner, &writer); });
            return of_this_process(std::move(writer));
          },
          nb::arg("path"), nb::arg("direct") = true, nb::arg("owner") = FileOwner::log)
      .def_prop_ro("path", [](const FileWriter& writer) { return to_str(writer.path()); })
      .def_prop_ro("direct", &FileWriter::direct)
      .def_prop_ro("position", &FileWriter::position, "Bytes that were appended")
      .def(
          "append",
          [](FileWriter& writer, Given& data) { make([&] { return writer.append(data.data(), data.size()); }); },
          nb::arg("data"))
      .def(
          "append_checked",
          [](FileWriter& writer, Given& data, uint32_t seed) {
            uint32_t crc = 0;
            make([&] { return writer.append_checked(data.data(), data.size(), seed, &crc); });
            return crc;
          },
          nb::arg("data"), nb::arg("seed") = 0, "And the CRC-32C of the bytes, going on from `seed`")
      .def(
          "finish", [](FileWriter& writer) { make([&] { return writer.finish(); }); }, "All of it is on the disk")
      .def("abandon", &FileWriter::abandon, Released(), "The file stays as it is")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> FileWriter"))
      .def(
          "__exit__",
          [](FileWriter& writer, nb::args) {
            nb::gil_scoped_release released;
            writer.abandon();
          },
          kExit);

  nb::class_<FileReader>(m, "FileReader", "Reads a file, ahead where reads ascend")
      .def_static(
          "open",
          [](const FilePath& path, bool direct, FileOwner owner) {
            std::unique_ptr<FileReader> reader;
            make([&] { return FileReader::open(path, direct, owner, &reader); });
            return of_this_process(std::move(reader));
          },
          nb::arg("path"), nb::arg("direct") = true, nb::arg("owner") = FileOwner::log)
      .def_prop_ro("path", [](const FileReader& reader) { return to_str(reader.path()); })
      .def_prop_ro("direct", &FileReader::direct)
      .def("size",
           [](const FileReader& reader) {
             int64_t bytes = 0;
             make([&] { return reader.size(&bytes); });
             return bytes;
           })
      .def(
          "read",
          [](FileReader& reader, int64_t offset, Wanted& out) {
            make([&] { return reader.read(offset, out.data(), out.size()); });
          },
          nb::arg("offset"), nb::arg("out"), "All of the bytes, or an error")
      .def(
          "read_checked",
          [](FileReader& reader, int64_t offset, Wanted& out) {
            uint32_t crc = 0;
            make([&] {
              // In pieces that are still in the cache when they are added up.
              for (int64_t at = 0; at < out.size(); at += kCheckedTogether) {
                char* piece = static_cast<char*>(out.data()) + at;
                const int64_t bytes = std::min(kCheckedTogether, out.size() - at);
                if (Status status = reader.read(offset + at, piece, bytes); !status.ok()) return status;
                crc = crc32c(piece, size_t(bytes), crc);
              }
              return Status();
            });
            return crc;
          },
          nb::arg("offset"), nb::arg("out"), "The same, and their checksum")
      .def("bytes_from_ahead", &FileReader::bytes_from_ahead, Released())
      .def("close", &FileReader::close, Released())
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> FileReader"))
      .def(
          "__exit__",
          [](FileReader& reader, nb::args) {
            nb::gil_scoped_release released;
            reader.close();
          },
          kExit);
}

static void bind_names(nb::module_& m) {
  m.def(
      "remove_file", [](const FilePath& path, FileOwner owner) { make([&] { return remove_file(path, owner); }); },
      nb::arg("path"), nb::arg("owner") = FileOwner::log, "No error where there is none");
  m.def(
      "remove_directory",
      [](const FilePath& path, FileOwner owner) { make([&] { return remove_directory(path, owner); }); },
      nb::arg("path"), nb::arg("owner") = FileOwner::log, "One that is empty; no error where there is none");
  m.def(
      "rename_file",
      [](const FilePath& from, const FilePath& to, FileOwner owner) {
        make([&] { return rename_file(from, to, owner); });
      },
      nb::arg("path"), nb::arg("to"), nb::arg("owner") = FileOwner::log, "In place of what is called `to`");
  m.def(
      "link_file",
      [](const FilePath& path, const FilePath& to, FileOwner owner) {
        bool made = false;
        make([&] { return link_file(path, to, owner, &made); });
        return made;
      },
      nb::arg("path"), nb::arg("to"), nb::arg("owner") = FileOwner::log,
      "One more name for a file. False where the file system gives it none");
  m.def(
      "sync_directory",
      [](const FilePath& path, FileOwner owner) { make([&] { return sync_directory(path, owner); }); }, nb::arg("path"),
      nb::arg("owner") = FileOwner::log, "Names that were given and taken in it are on the disk");
  m.def(
      "make_directories",
      [](const FilePath& path, FileOwner owner) { make([&] { return make_directories(path, owner); }); },
      nb::arg("path"), nb::arg("owner") = FileOwner::log, "With those above it, and on the disk");
  m.def(
      "list_directory",
      [](const FilePath& path, FileOwner owner) {
        std::vector<std::string> names;
        make([&] { return list_directory(path, owner, &names); });
        nb::typed<nb::list, nb::str> listed;
        for (const std::string& name : names) listed.append(to_str(name));
        return listed;
      },
      nb::arg("path"), nb::arg("owner") = FileOwner::log);
  m.def(
      "file_size",
      [](const FilePath& path, FileOwner owner) {
        std::optional<int64_t> bytes;
        make([&] { return file_size(path, owner, &bytes); });
        return bytes;
      },
      nb::arg("path"), nb::arg("owner") = FileOwner::log, "None where there is no file");
  m.def(
      "look_at",
      [](const FilePath& path, FileOwner owner) {
        std::optional<FileEntry> entry;
        make([&] { return look_at(path, owner, &entry); });
        return entry;
      },
      nb::arg("path"), nb::arg("owner") = FileOwner::log, "What its name stands for; None where there is none");
  m.def(
      "crc32c",
      [](Given& data, uint32_t seed) {
        nb::gil_scoped_release released;
        return crc32c(data.data(), size_t(data.size()), seed);
      },
      nb::arg("data"), nb::arg("seed") = 0, "Going on from the CRC-32C of what came before");
}

static void bind_faults(nb::module_& m) {
  nb::enum_<FileCall>(m, "FileCall")
      .value("open", FileCall::open)
      .value("read", FileCall::read)
      .value("write", FileCall::write)
      .value("sync", FileCall::sync)
      .value("remove", FileCall::remove)
      .value("rename", FileCall::rename)
      .value("link", FileCall::link)
      .value("truncate", FileCall::truncate)
      .value("sync_directory", FileCall::sync_directory)
      .value("list", FileCall::list)
      .value("make_directory", FileCall::make_directory)
      .value("size", FileCall::size);
  m.def(
      "inject_fault",
      [](FileCall call, const std::string& path_part, int error, int64_t after, int64_t times) {
        Faults::instance().inject({call, path_part, error, after, times});
      },
      nb::arg("call"), nb::arg("path_part"), nb::arg("error"), nb::arg("after") = 0, nb::arg("times") = 1,
      "For tests: calls of that kind on files with that in their path answer with an errno");
  m.def("clear_faults", [] { Faults::instance().clear(); });
  m.def(
      "record_power_cut", [](const std::string& path_part) { PowerCut::instance().record(path_part); },
      nb::arg("path_part"), Released(),
      "For tests: from now on, changes to files with that in their path remember what they replaced until they are "
      "durable");
  m.def(
      "cut_power", [](uint64_t seed) { make([&] { return PowerCut::instance().cut(seed); }); }, nb::arg("seed"),
      "Takes a random part of what is not durable back, and ends the recording");
  m.def("forget_power_cut", [] { PowerCut::instance().stop(); }, Released(), "Ends the recording; all stays as it is");
}

void bind_file(nb::module_& m) {
  nb::enum_<FileOwner>(m, "FileOwner", "Whose file it is: errors say what to do about it")
      .value("ssd", FileOwner::ssd)
      .value("log", FileOwner::log);
  bind_paths(m);
  bind_files(m);
  bind_streams(m);
  bind_names(m);
  bind_faults(m);
}

}  // namespace shoal
