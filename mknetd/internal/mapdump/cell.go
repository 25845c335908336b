package mapdump

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// cell is one field of one row.
type cell struct {
	n    uint64 // idle: ns
	s    string
	list []uint64
}

// mask is the part of the number, after its shift, that is the field.
func (f Field) mask() uint64 {
	width := f.width
	if width == 0 {
		width = uint(8 * f.Bytes)
	}
	if width >= 64 {
		return ^uint64(0)
	}
	return 1<<width - 1
}

// max is the highest number that the field can hold.
func (f Field) max() uint64 {
	if f.Part == InIndex || f.Bytes == 0 {
		return 1<<32 - 1
	}
	if m := f.mask(); m <= ^uint64(0)-f.base {
		return m + f.base
	}
	return ^uint64(0)
}

// word reads a number of 1 to 8 bytes.
func word(b []byte, wire bool) uint64 {
	var w [8]byte
	if wire {
		copy(w[8-len(b):], b)
		return binary.BigEndian.Uint64(w[:])
	}
	copy(w[:], b)
	return binary.LittleEndian.Uint64(w[:])
}

// putWord is the inverse of word; bits that b has no room for are lost.
func putWord(b []byte, n uint64, wire bool) {
	var w [8]byte
	if wire {
		binary.BigEndian.PutUint64(w[:], n)
		copy(b, w[8-len(b):])
		return
	}
	binary.LittleEndian.PutUint64(w[:], n)
	copy(b, w[:])
}

// read takes the field out of the bytes of its part. now is CLOCK_MONOTONIC.
func (f Field) read(part []byte, now time.Duration) cell {
	b := part[f.Offset : f.Offset+f.Bytes]
	switch f.kind {
	case text:
		s, _, _ := strings.Cut(string(b), "\x00")
		return cell{s: s}
	case numbers:
		var c cell
		for ; len(b) >= 4; b = b[4:] {
			n := uint64(binary.LittleEndian.Uint32(b))
			if n == 0 {
				break
			}
			c.list = append(c.list, n)
		}
		return c
	case bitmap:
		var c cell
		for i, x := range b {
			for ; x != 0; x &= x - 1 {
				c.list = append(c.list, uint64(8*i+bits.TrailingZeros8(x)))
			}
		}
		return c
	case idle:
		seen := word(b, false)
		if f.unit != 0 { // 32 bits of a longer number
			age := int32(uint32(uint64(now)>>f.unit) - uint32(seen))
			return cell{n: uint64(max(age, 0)) << f.unit}
		}
		return cell{n: uint64(max(int64(now)-int64(seen), 0))}
	}
	return cell{n: word(b, f.wire)>>f.shift&f.mask() + f.base}
}

// plain is the cell as JSON has it.
func (f Field) plain(c cell) any {
	switch f.kind {
	case address:
		return addrOf(c.n).String()
	case mac:
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], c.n)
		return net.HardwareAddr(b[2:]).String()
	case label:
		if name, ok := f.labels[c.n]; ok {
			return name
		}
		return strconv.FormatUint(c.n, 10)
	case flags:
		out, rest := []string{}, c.n
		for i := range 64 {
			b := uint64(1) << i
			if name, ok := f.labels[b]; ok && c.n&b != 0 {
				out = append(out, name)
				rest &^= b
			}
		}
		if rest != 0 {
			out = append(out, fmt.Sprintf("%#x", rest))
		}
		return out
	case digits:
		return fmt.Sprintf("%016x", c.n)
	case text:
		return c.s
	case numbers, bitmap:
		if c.list == nil {
			return []uint64{}
		}
		return c.list
	case idle:
		return float64(c.n/1e8) / 10
	}
	return c.n
}

// show is the cell as the table has it.
func (f Field) show(c cell) string {
	switch v := f.plain(c).(type) {
	case []string:
		return orDash(strings.Join(v, ","))
	case []uint64:
		return orDash(ranges(v))
	case string:
		return orDash(v)
	case float64:
		return strconv.FormatFloat(v, 'f', 1, 64) + "s"
	default:
		return fmt.Sprint(v)
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// ranges writes numbers, those that follow each other as 3-7.
func ranges(list []uint64) string {
	var b strings.Builder
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatUint(list[i], 10))
		if j > i {
			b.WriteString("-" + strconv.FormatUint(list[j], 10))
		}
		i = j + 1
	}
	return b.String()
}

func addrOf(n uint64) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(n))
	return netip.AddrFrom4(b)
}

// Label is the label of a number, empty where it has none.
func (f Field) Label(n uint64) string { return f.labels[n] }

// labelNames lists labels in the order of their numbers.
func (f Field) labelNames() []string {
	var keys []uint64
	for n := range f.labels {
		keys = append(keys, n)
	}
	slices.Sort(keys)
	out := make([]string, len(keys))
	for i, n := range keys {
		out[i] = f.labels[n]
	}
	return out
}
