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
  // Half precision. Exponents move by 127 - 15, those of infinity and NaN twice. Subnormal numbers get an exponent, and
  // a float subtraction removes it. No intermediate value is a subnormal float32, as a thread may flush those to zero.
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

// Whether all values are finite: infinity and NaN have the highest exponent.
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

OpenFile::~OpenFile() { ::close(descriptor_); }

ShardReader::ShardReader(std::vector<File> files, Type stored, std::size_t most_open)
    : files_(std::move(files)),
      stored_(stored),
      most_open_(std::max<std::size_t>(most_open, 1)),
      cache_(new Cache(files_.size())) {}

ShardReader::~ShardReader() { delete cache_.load(); }

ShardReader::Cache::Cache(std::size_t files) : process(::getpid()), place(files, recent.end()) {}

// The cache of this process. A parent's cache is not used: a thread that this process lacks may hold its lock.
ShardReader::Cache& ShardReader::cache() const {
  Cache* found = cache_.load();
  if (found->process == ::getpid()) {
    return *found;
  }
  auto own = std::make_unique<Cache>(files_.size());
  // If another thread was faster, `found` is now its cache.
  return cache_.compare_exchange_strong(found, own.get()) ? *own.release() : *found;
}

bool ShardReader::is_as_before(std::size_t file) const {
  struct stat named;
  return ::stat(files_[file].path.c_str(), &named) == 0 && matches(files_[file], named);
}

// Returns the open file. If it has changed or cannot be opened, returns nothing and sets `outcome`.
ShardReader::Handle ShardReader::handle(std::size_t file, Outcome& outcome) const {
  Cache& open = cache();
  {
    const std::lock_guard<std::mutex> guard(open.mutex);
    if (open.place[file] != open.recent.end()) {
      open.recent.splice(open.recent.begin(), open.recent, open.place[file]);
      return open.recent.front().second;
    }
  }
  // Without the lock, so that other threads can use open files while a slow disk opens this one.
  const int descriptor = ::open(files_[file].path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    outcome = {errno == ENOENT ? Problem::changed : Problem::not_readable, -1, errno};
    return nullptr;
  }
  Handle opened;
  try {
    opened = std::make_shared<const OpenFile>(descriptor);
  } catch (const std::bad_alloc&) {
    ::close(descriptor);
    outcome = {Problem::not_readable, -1, ENOMEM};
    return nullptr;
  }
  struct stat status;
  if (::fstat(descriptor, &status) != 0 || !matches(files_[file], status)) {
    outcome = {Problem::changed, -1, 0};
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(open.mutex);
  if (open.place[file] != open.recent.end()) {
    return open.place[file]->second;
  }
  try {
    open.recent.emplace_front(file, opened);
  } catch (const std::bad_alloc&) {
    return opened;
  }
  open.place[file] = open.recent.begin();
  if (open.recent.size() > most_open_) {
    // The file is closed once no thread reads from it.
    open.place[open.recent.back().first] = open.recent.end();
    open.recent.pop_back();
  }
  return opened;
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
  Outcome refused;
  const Handle opened = handle(static_cast<std::size_t>(row.file), refused);
  if (opened == nullptr) {
    return refused;
  }
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t count = ::pread(opened->descriptor(), into + done, bytes - done, row.offset + done);
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
  cache();  // Allocate it here, where a failure can be reported.
  // The first row of each file, in the order of the rows.
  std::vector<std::size_t> firsts;
  std::vector<char> seen(files_.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto file = static_cast<std::size_t>(rows[i].file);
    if (!seen[file]) {
      firsts.push_back(i);
    }
    seen[file] = 1;
  }
  const auto changed = [&] {
    for (const std::size_t i : firsts) {
      if (!is_as_before(static_cast<std::size_t>(rows[i].file))) {
        return Outcome{Problem::changed, static_cast<std::int64_t>(i), 0};
      }
    }
    return Outcome{};
  };
  Outcome first = changed();
  if (first.problem != Problem::none) {
    return first;
  }
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  const auto work = [&] {
    std::vector<unsigned char> scratch;
    // Rows are taken in order and always finished, so the first problem does not depend on the order of threads.
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
  // Reserve before the first thread runs: a vector that fails to grow would terminate the process.
  others.reserve(wanted_threads);
  for (std::size_t i = 1; i < wanted_threads; ++i) {
    try {
      others.emplace_back(work);
    } catch (const std::exception&) {
      break;  // The system cannot start another thread: the running threads do the work.
    }
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
  // If a file was written to meanwhile, each of its rows may mix old and new content.
  const Outcome afterwards = changed();
  return afterwards.problem == Problem::none ? first : afterwards;
}

}  // namespace itm_fast::host
