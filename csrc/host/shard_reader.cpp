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

OpenFile::~OpenFile() { ::close(descriptor_); }

ShardReader::ShardReader(std::vector<File> files, Type stored, std::size_t most_open)
    : files_(std::move(files)),
      stored_(stored),
      most_open_(std::max<std::size_t>(most_open, 1)),
      cache_(new Cache(files_.size())) {}

ShardReader::~ShardReader() { delete cache_.load(); }

ShardReader::Cache::Cache(std::size_t files) : process(::getpid()), place(files, recent.end()) {}

// The cache of this process. That of a parent is left as it is: its lock may be held by a thread that is not here.
ShardReader::Cache& ShardReader::cache() const {
  Cache* found = cache_.load();
  if (found->process == ::getpid()) {
    return *found;
  }
  auto own = std::make_unique<Cache>(files_.size());
  // Where another thread was first, `found` is its cache now.
  return cache_.compare_exchange_strong(found, own.get()) ? *own.release() : *found;
}

bool ShardReader::is_as_before(std::size_t file) const {
  struct stat named;
  return ::stat(files_[file].path.c_str(), &named) == 0 && matches(files_[file], named);
}

// The open file; nothing, and why in `outcome`, where it is not what it was or cannot be opened.
ShardReader::Handle ShardReader::handle(std::size_t file, Outcome& outcome) const {
  Cache& open = cache();
  {
    const std::lock_guard<std::mutex> guard(open.mutex);
    if (open.place[file] != open.recent.end()) {
      open.recent.splice(open.recent.begin(), open.recent, open.place[file]);
      return open.recent.front().second;
    }
  }
  // Not under the lock: other threads go on with files that are open while a slow disk looks for this one.
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
    // Closed once no thread reads from it.
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
  cache();  // Its memory is taken here, where want of it can be told.
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
  // Of a file that was written to meanwhile any of the rows may be half of the one and half of the other.
  const Outcome afterwards = changed();
  return afterwards.problem == Problem::none ? first : afterwards;
}

}  // namespace itm_fast::host
