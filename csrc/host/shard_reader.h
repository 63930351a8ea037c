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

// What a file was when it was last looked at: replaced and changed files differ in it.
struct File {
  std::string path;
  std::int64_t bytes;
  std::int64_t modified;  // nanoseconds
  std::uint64_t inode;
};

// One row: `values` numbers at the byte `offset` of a file, and which number of the buffer its first one becomes.
struct Row {
  std::int64_t file;
  std::int64_t offset;
  std::int64_t values;
  std::int64_t destination;
};

enum class Problem { none, changed, short_read, not_readable, not_finite };

// The first problem in the order of the rows; `detail` is an errno or the bytes that were there.
struct Outcome {
  Problem problem = Problem::none;
  std::int64_t row = -1;
  std::int64_t detail = 0;
};

// A file that is open for reading for as long as somebody has this.
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
  // Keeps at most `most_open` files open, those used last: a system gives a process some thousand handles at best.
  ShardReader(std::vector<File> files, Type stored, std::size_t most_open);
  ~ShardReader();
  ShardReader(const ShardReader&) = delete;
  ShardReader& operator=(const ShardReader&) = delete;

  // Fills a buffer of numbers, float32 or as they are stored. Rows, which the caller has checked against files and
  // buffer, are read in their order, each by the next of `threads` threads that is free. Files are compared with what
  // they were before their first row is read, and again after all rows are. Threads live as long as the call, and a
  // process that forks has open files and a lock of its own: one of its parent's threads may hold the old one for ever.
  Outcome gather(const std::vector<Row>& rows, void* buffer, Type wanted, int threads) const;

  std::size_t files() const { return files_.size(); }
  Type stored() const { return stored_; }

 private:
  using Handle = std::shared_ptr<const OpenFile>;
  using Recent = std::list<std::pair<std::size_t, Handle>>;

  // The open files of a process, that used last in front, and where each file stands there; the end: it is not open.
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
