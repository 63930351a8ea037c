#include "shard_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace itm_fast::host {

namespace {

std::int64_t modified(const struct stat& status) {
#ifdef __APPLE__
  const auto& time = status.st_mtimespec;
#else
  const auto& time = status.st_mtim;
#endif
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

bool matches(const File& file, const struct stat& status) {
  return status.st_size == file.bytes && modified(status) == file.modified && status.st_ino == file.inode;
}

std::uint32_t widened(std::uint16_t value, Type stored) {
  if (stored == Type::bf16) {
    return std::uint32_t{value} << 16;
  }
  // Half precision. Exponents move by 127 - 15; those of infinity and NaN once more. Numbers without an exponent get
  // one and lose it in a subtraction of floats, so that nothing here is a float32 without exponent, which a thread may
  // be set to flush to zero.
  constexpr std::uint32_t exponents = 0x7c00u << 13;
  std::uint32_t bits = (value & 0x7fffu) << 13;
  const std::uint32_t exponent = bits & exponents;
  bits += 112u << 23;
  const std::uint32_t special = bits + (112u << 23);
  float small;
  const std::uint32_t raised = bits + (1u << 23);
  std::memcpy(&small, &raised, 4);
  small -= 6.103515625e-05f;  // 2^-14
  std::uint32_t subnormal;
  std::memcpy(&subnormal, &small, 4);
  bits = exponent == exponents ? special : exponent == 0 ? subnormal : bits;
  return bits | (std::uint32_t{value & 0x8000u} << 16);
}

template <Type stored>
void widen(const std::uint16_t* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = widened(from[i], stored);
    std::memcpy(to + i, &bits, 4);
  }
}

// Whether all exponents are below the highest, which is that of infinity and NaN.
template <typename Bits>
bool all_finite(const Bits* values, std::int64_t count, Bits exponents) {
  Bits found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    found |= static_cast<Bits>((values[i] & exponents) == exponents);
  }
  return found == 0;
}

bool all_finite(const void* values, std::int64_t count, Type type) {
  if (type == Type::fp32) {
    return all_finite(static_cast<const std::uint32_t*>(values), count, std::uint32_t{0x7f800000});
  }
  const auto exponents = static_cast<std::uint16_t>(type == Type::bf16 ? 0x7f80 : 0x7c00);
  return all_finite(static_cast<const std::uint16_t*>(values), count, exponents);
}

}  // namespace

ShardReader::ShardReader(std::vector<File> files, Type stored) : files_(std::move(files)), stored_(stored) {
  for (const File& file : files_) {
    const int handle = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (handle < 0) {
      const int error = errno;
      for (const int opened : handles_) {
        ::close(opened);
      }
      throw std::runtime_error(file.path + ": cannot be opened: " + std::generic_category().message(error));
    }
    handles_.push_back(handle);
  }
}

ShardReader::~ShardReader() {
  for (const int handle : handles_) {
    ::close(handle);
  }
}

bool ShardReader::is_as_before(std::size_t file) const {
  struct stat opened, named;
  return ::fstat(handles_[file], &opened) == 0 && ::stat(files_[file].path.c_str(), &named) == 0 &&
         matches(files_[file], opened) && matches(files_[file], named);
}

Outcome ShardReader::read(const Row& row, void* buffer, Type wanted, std::vector<unsigned char>& scratch) const {
  const std::size_t bytes = static_cast<std::size_t>(row.values) * size_of(stored_);
  unsigned char* const place = static_cast<unsigned char*>(buffer) + row.destination * size_of(wanted);
  unsigned char* into = place;
  if (wanted != stored_) {
    try {
      scratch.resize(std::max(scratch.size(), bytes));
    } catch (const std::bad_alloc&) {
      return {Problem::not_readable, -1, ENOMEM};
    }
    into = scratch.data();
  }
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t count = ::pread(handles_[row.file], into + done, bytes - done, row.offset + done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      return {Problem::not_readable, -1, errno};
    }
    if (count == 0) {
      return {Problem::short_read, -1, static_cast<std::int64_t>(done)};
    }
    done += static_cast<std::size_t>(count);
  }
  if (!all_finite(into, row.values, stored_)) {
    return {Problem::not_finite, -1, 0};
  }
  if (wanted != stored_) {
    const auto* const from = reinterpret_cast<const std::uint16_t*>(into);
    auto* const to = reinterpret_cast<float*>(place);
    if (stored_ == Type::bf16) {
      widen<Type::bf16>(from, to, row.values);
    } else {
      widen<Type::fp16>(from, to, row.values);
    }
  }
  return {};
}

Outcome ShardReader::gather(const std::vector<Row>& rows, void* buffer, Type wanted, int threads) const {
  std::vector<char> looked_at(files_.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto file = static_cast<std::size_t>(rows[i].file);
    if (!looked_at[file] && !is_as_before(file)) {
      return {Problem::changed, static_cast<std::int64_t>(i), 0};
    }
    looked_at[file] = 1;
  }
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  Outcome first;
  const auto work = [&] {
    std::vector<unsigned char> scratch;
    // Rows are taken in order and finished once taken, so the first problem is the same however threads take turns.
    while (!failed.load()) {
      const std::size_t i = next.fetch_add(1);
      if (i >= rows.size()) {
        return;
      }
      Outcome outcome = read(rows[i], buffer, wanted, scratch);
      if (outcome.problem != Problem::none) {
        outcome.row = static_cast<std::int64_t>(i);
        const std::lock_guard<std::mutex> guard(mutex);
        if (first.problem == Problem::none || outcome.row < first.row) {
          first = outcome;
        }
        failed.store(true);
      }
    }
  };
  std::vector<std::thread> others;
  const std::size_t wanted_threads = std::min<std::size_t>(std::max(threads, 1), rows.size());
  // Room for all of them before the first one runs: a vector that cannot grow would end the process with its threads.
  others.reserve(wanted_threads);
  for (std::size_t i = 1; i < wanted_threads; ++i) {
    try {
      others.emplace_back(work);
    } catch (const std::exception&) {
      break;  // The system has no thread, or no memory for one: those that run do the work.
    }
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
  return first;
}

}  // namespace itm_fast::host
