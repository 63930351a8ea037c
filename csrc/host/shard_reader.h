// Reads rows of numbers from many places of many files into one buffer, with several threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace itm_fast::host {

enum class Type { bf16, fp16, fp32 };

inline std::size_t size_of(Type type) { return type == Type::fp32 ? 4 : 2; }

// A file and its state when it was opened. Replacing or changing the file changes the state.
struct File {
  std::string path;
  std::int64_t bytes;
  std::int64_t modified;  // nanoseconds
  std::uint64_t inode;
};

// One row: `values` numbers at the byte `offset` of a file, and their position in the buffer, in numbers.
struct Row {
  std::int64_t file;
  std::int64_t offset;
  std::int64_t values;
  std::int64_t destination;
};

enum class Problem { none, changed, short_read, not_readable, not_finite };

// The first problem in the order of the rows; `detail` is an errno or the number of bytes found.
struct Outcome {
  Problem problem = Problem::none;
  std::int64_t row = -1;
  std::int64_t detail = 0;
};

// A file that is open for reading until this object is destroyed.
class OpenFile {
 public:
  explicit OpenFile(int descriptor) : descriptor_(descriptor) {}
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

class ShardReader {
 public:
  // Keeps the `most_open` last used files open: systems limit the handles of a process, often to about a thousand.
  ShardReader(std::vector<File> files, Type stored, std::size_t most_open);
  ~ShardReader();
  ShardReader(const ShardReader&) = delete;
  ShardReader& operator=(const ShardReader&) = delete;

  // Fills a buffer of numbers in float32 or in the stored type. The caller has checked the rows against files and
  // buffer. They are read in order, each by the next free one of `threads` threads. Each file is compared with its
  // state before its first row is read, and again after all rows. The threads end with the call. A forked process has
  // its own open files and lock, because a thread of its parent may have held the old lock.
  Outcome gather(const std::vector<Row>& rows, void* buffer, Type wanted, int threads) const;

  std::size_t files() const { return files_.size(); }
  Type stored() const { return stored_; }

 private:
  using Handle = std::shared_ptr<const OpenFile>;
  using Recent = std::list<std::pair<std::size_t, Handle>>;

  // The open files of a process, the last used first, and the position of each file in that list (end if not open).
  struct Cache {
    explicit Cache(std::size_t files);

    const pid_t process;
    std::mutex mutex;
    Recent recent;
    std::vector<Recent::iterator> place;
  };

  bool is_as_before(std::size_t file) const;
  Cache& cache() const;
  Handle handle(std::size_t file, Outcome& outcome) const;
  Outcome read(const Row& row, void* buffer, Type wanted, std::vector<unsigned char>& scratch) const;

  std::vector<File> files_;
  Type stored_;
  std::size_t most_open_;
  mutable std::atomic<Cache*> cache_;
};

}  // namespace itm_fast::host
