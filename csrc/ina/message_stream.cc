#include "ina/message_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ina/socket.h"

namespace sparsecomm {
namespace {

constexpr std::size_t most_parts = 32;  // of a write

iovec part(void const* data, std::size_t size) { return {const_cast<void*>(data), size}; }

bool not_now(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

// Makes room for one more at the end of the queue.
MessageStream::Outgoing& MessageStream::append(std::uint32_t instance) {
  if (count_ == queue_.size()) {
    std::rotate(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(first_), queue_.end());
    first_ = 0;
    queue_.resize(std::max<std::size_t>(8, 2 * queue_.size()));
  }
  Outgoing& last = queue_[(first_ + count_++) % queue_.size()];
  last.envelope.instance = instance;
  return last;
}

void MessageStream::send(std::uint32_t instance, InaMessage const& message,
                         std::shared_ptr<void const> memory) {
  if (!error_.empty()) return;
  Outgoing& last = append(instance);
  last.message = message;
  last.memory = std::move(memory);
  last.envelope.bytes = static_cast<std::uint32_t>(message.size());
  if (count_ == 1) flush();
}

void MessageStream::send_copy(std::uint32_t instance, std::span<const std::byte> message) {
  if (!error_.empty()) return;
  copied_ += message.size();
  if (copied_ > most_copied) {
    error_ = concat("more than ", most_copied, " bytes wait: the other side does not read");
    return;
  }
  Outgoing& last = append(instance);
  last.copy.assign(message.begin(), message.end());
  last.message = {};
  last.message.add(last.copy);
  last.envelope.bytes = static_cast<std::uint32_t>(message.size());
  if (count_ == 1) flush();
}

void MessageStream::flush() {
  while (count_ > 0 && error_.empty()) {
    std::array<iovec, most_parts> parts;
    std::size_t used = 0;
    std::size_t skip = written_;
    for (std::size_t i = 0; i < count_ && used + 4 <= most_parts; ++i) {
      Outgoing const& outgoing = queue_[(first_ + i) % queue_.size()];
      auto const add = [&](std::byte const* data, std::size_t size) {
        std::size_t const gone = std::min(skip, size);
        skip -= gone;
        if (gone < size) parts[used++] = part(data + gone, size - gone);
      };
      add(reinterpret_cast<std::byte const*>(&outgoing.envelope), sizeof(InaEnvelope));
      for (auto const piece : outgoing.message.pieces()) add(piece.data(), piece.size());
    }
    msghdr header{};
    header.msg_iov = parts.data();
    header.msg_iovlen = used;
    ssize_t const written = ::sendmsg(file_, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (!not_now(errno)) error_ = system_text();
      return;
    }
    written_ += static_cast<std::size_t>(written);
    for (; count_ > 0 && written_ >= queue_[first_].size(); --count_) {
      Outgoing& done = queue_[first_];
      written_ -= done.size();
      copied_ -= done.copy.size();
      done.copy = {};
      done.memory.reset();
      done.message = {};
      first_ = (first_ + 1) % queue_.size();
    }
  }
}

// Has the message that the buffer begins with placed, once enough of it is there.
bool MessageStream::begin_message(MessageSink& sink) {
  auto const there = buffered();
  InaEnvelope envelope;
  if (there.size() < sizeof(envelope)) return false;
  std::memcpy(&envelope, there.data(), sizeof(envelope));
  require<MalformedFrame>(envelope.bytes >= sizeof(InaHeader) && envelope.bytes <= longest_message,
                          "aggregation message: length is ", envelope.bytes, ", must be ",
                          sizeof(InaHeader), " to ", longest_message);
  std::size_t const begin = std::min<std::size_t>(envelope.bytes, opening_bytes);
  if (there.size() < sizeof(envelope) + begin) return false;
  place_ = sink.place(envelope.instance, envelope.bytes, there.subspan(sizeof(envelope), begin));
  require(place_.bytes.empty() || place_.bytes.size() == envelope.bytes, "a place of ",
          place_.bytes.size(), " bytes for a message of ", envelope.bytes);
  begin_ += sizeof(envelope);
  instance_ = envelope.instance;
  bytes_ = envelope.bytes;
  arrived_ = 0;
  in_message_ = true;
  return true;
}

bool MessageStream::receive(MessageSink& sink) {
  if (!error_.empty()) return false;
  try {
    for (;;) {
      if (in_message_ || begin_message(sink)) {
        auto const there = buffered().first(std::min(end_ - begin_, bytes_ - arrived_));
        if (!place_.bytes.empty() && !there.empty()) {
          std::memcpy(place_.bytes.data() + arrived_, there.data(), there.size());
        }
        begin_ += there.size();
        arrived_ += there.size();
        if (arrived_ == bytes_) {
          in_message_ = false;
          auto const place = std::exchange(place_, {});
          if (!place.bytes.empty()) sink.take(instance_, place.bytes);
          return true;
        }
      }
      if (!read_some()) return false;
    }
  } catch (MalformedFrame const& error) {
    error_ = error.what();
    malformed_ = true;
    return false;
  }
}

// Reads the rest of the message to its place, and what follows it to the buffer.
bool MessageStream::read_some() {
  std::size_t const kept = end_ - begin_;
  std::memmove(buffer_.data(), buffer_.data() + begin_, kept);
  begin_ = 0;
  end_ = kept;
  std::array<iovec, 2> parts;
  int used = 0;
  std::size_t direct = 0;
  if (in_message_ && !place_.bytes.empty()) {
    direct = bytes_ - arrived_;
    parts[used++] = part(place_.bytes.data() + arrived_, direct);
  }
  parts[used++] = part(buffer_.data() + end_, buffer_.size() - end_);
  ssize_t read = 0;
  do {
    read = ::readv(file_, parts.data(), used);
  } while (read < 0 && errno == EINTR);
  if (read < 0) {
    if (!not_now(errno)) error_ = system_text();
    return false;
  }
  if (read == 0) {
    error_ = "the other side has closed the connection";
    return false;
  }
  auto const bytes = static_cast<std::size_t>(read);
  std::size_t const placed = std::min(bytes, direct);
  arrived_ += placed;
  end_ += bytes - placed;
  return true;
}

}  // namespace sparsecomm
