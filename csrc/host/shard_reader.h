// Reads rows of numbers from many places of many files into one buffer, with several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
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

class ShardReader {
 public:
  // Throws std::runtime_error naming the file that cannot be opened.
  ShardReader(std::vector<File> files, Type stored);
  ~ShardReader();
  ShardReader(const ShardReader&) = delete;
  ShardReader& operator=(const ShardReader&) = delete;

  // Fills a buffer of numbers, float32 or as they are stored. Rows, which the caller has checked against files and
  // buffer, are read in their order, each by the next of `threads` threads that is free. Threads live as long as the
  // call: a process that forks in between has none to lose.
  Outcome gather(const std::vector<Row>& rows, void* buffer, Type wanted, int threads) const;

  std::size_t files() const { return files_.size(); }
  Type stored() const { return stored_; }

 private:
  bool is_as_before(std::size_t file) const;
  Outcome read(const Row& row, void* buffer, Type wanted, std::vector<unsigned char>& scratch) const;

  std::vector<File> files_;
  std::vector<int> handles_;
  Type stored_;
};

}  // namespace itm_fast::host
