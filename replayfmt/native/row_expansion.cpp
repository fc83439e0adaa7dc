// Templates filled with columns: what replayfmt/dump/expansion.py does in Python, byte for byte. It knows nothing of
// captures and needs neither PyTorch nor Python; what each piece and column means is said there.

#include <charconv>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

enum Kind : int64_t { kNumbers, kWords, kHalves };
enum Flag : int64_t { kQuoted = 1, kUnsigned = 2, kHasNull = 4 };
constexpr int64_t kExact = int64_t{1} << 53;  // row_templates.EXACT

struct Column {
  int64_t kind, flags, null;
  int64_t length;         // of `values`, or of the words where they are shown in their own order
  int64_t words;          // how many there are; of numbers: 1, what stands before each
  const int64_t* first;   // where a row's places begin in `values`; null: at the row itself
  const int64_t* values;  // null: words in their own order
  const char* text;
  const int64_t* ends;  // of each word in `text`, after a 0
};

struct Piece {
  int32_t column;  // -1: text alone
  int32_t first, count;
  int32_t text, length;  // the text, or what separates the values of a run
};

class Output {
 public:
  Output(char* at, char* end) : at_(at), end_(end) {}

  bool put(const char* text, int64_t length) {
    if (end_ - at_ < length) return false;
    std::memcpy(at_, text, static_cast<size_t>(length));
    at_ += length;
    return true;
  }

  bool number(int64_t value, int64_t flags) {
    const bool is_unsigned = flags & kUnsigned;
    const uint64_t magnitude =
        is_unsigned || value >= 0 ? static_cast<uint64_t>(value) : 0 - static_cast<uint64_t>(value);
    const bool quoted = (flags & kQuoted) && magnitude > static_cast<uint64_t>(kExact);
    if (end_ - at_ < 24) return false;  // 20 digits or 19 and a sign, and quotes
    if (quoted) *at_++ = '"';
    at_ = is_unsigned ? std::to_chars(at_, end_, magnitude).ptr : std::to_chars(at_, end_, value).ptr;
    if (quoted) *at_++ = '"';
    return true;
  }

  bool hexadecimal(uint64_t high, uint64_t low) {
    if (end_ - at_ < 32) return false;
    for (const uint64_t half : {high, low})
      for (int shift = 60; shift >= 0; shift -= 4) *at_++ = "0123456789abcdef"[(half >> shift) & 15];
    return true;
  }

  char* at() const { return at_; }

 private:
  char* at_;
  char* end_;
};

enum class Filled { yes, no_room, out_of_range };

Filled word(const Column& column, int64_t index, Output& out) {
  if (index < 0 || index >= column.words) return Filled::out_of_range;
  const int64_t begin = column.ends[index];
  return out.put(column.text + begin, column.ends[index + 1] - begin) ? Filled::yes : Filled::no_room;
}

Filled value(const Column& column, int64_t place, Output& out) {
  if (place < 0 || place + (column.kind == kHalves) >= column.length) return Filled::out_of_range;
  if (column.kind == kWords) return word(column, column.values ? column.values[place] : place, out);
  const int64_t* at = column.values + place;
  if (column.kind == kHalves)
    return out.hexadecimal(static_cast<uint64_t>(at[1]), static_cast<uint64_t>(at[0])) ? Filled::yes : Filled::no_room;
  if (const Filled before = word(column, 0, out); before != Filled::yes) return before;
  const bool done =
      (column.flags & kHasNull) && *at == column.null ? out.put("null", 4) : out.number(*at, column.flags);
  return done ? Filled::yes : Filled::no_room;
}

Filled fill(const Piece* piece, const Piece* end, const char* texts, const Column* columns, int64_t row, Output& out) {
  for (; piece != end; ++piece) {
    if (piece->column < 0) {
      if (!out.put(texts + piece->text, piece->length)) return Filled::no_room;
      continue;
    }
    const Column& column = columns[piece->column];
    const int64_t place = (column.first ? column.first[row] : row) + piece->first;
    for (int32_t each = 0; each < piece->count; ++each) {
      if (each && !out.put(texts + piece->text, piece->length)) return Filled::no_room;
      if (const Filled done = value(column, place + each, out); done != Filled::yes) return done;
    }
  }
  return Filled::yes;
}

}  // namespace

// Fills rows from `row` on, as many as fit whole into `room` bytes. `pieces` and `texts` hold all templates, of which
// number n begins at piece_first[n] and text_first[n]; row r is of template which[r]. Where `ends` is given, it takes
// the end of each row in `out`. Returns how many rows it filled, and how many bytes in `written`; -1 where a piece
// names a place that its column does not have.
extern "C" __attribute__((visibility("default"))) int64_t opreplay_expand_rows(
    const Piece* pieces, const int64_t* piece_first, const char* texts, const int64_t* text_first, const int64_t* which,
    const Column* columns, int64_t row, int64_t rows, char* out, int64_t room, int64_t* ends, int64_t* written) {
  Output output(out, out + room);
  *written = 0;
  const int64_t begin = row;
  for (; row < rows; ++row) {
    const int64_t number = which[row];
    const Filled done = fill(pieces + piece_first[number], pieces + piece_first[number + 1], texts + text_first[number],
                             columns, row, output);
    if (done == Filled::out_of_range) return -1;
    if (done == Filled::no_room) break;
    *written = output.at() - out;
    if (ends) ends[row] = *written;
  }
  return row - begin;
}
