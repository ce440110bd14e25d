package openai

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// What is read of a stream at most. One event is one token with some hundred bytes
// around it.
const (
	maxEventBytes  = 1 << 20
	maxStreamBytes = 1 << 29
)

// ErrTooLong says that the server sends more than any answer needs.
var ErrTooLong = errors.New("the answer is longer than any model's")

// Event is one server-sent event.
type Event struct {
	// Name is the event's type; empty for a plain message.
	Name string
	// Data holds the data lines, joined by line feeds.
	Data string
}

// Stream reads server-sent events as the HTML standard defines them (section 9.2,
// "Server-sent events"), within bounds. In one point it is milder: an event that the
// end of the stream cuts off before its blank line counts, as some servers end so
// after their last event.
type Stream struct {
	in    *bufio.Reader
	line  []byte
	read  int64
	begun bool
	// afterCR is set while a line feed would belong to the carriage return before it.
	afterCR bool
}

// NewStream reads events from in.
func NewStream(in io.Reader) *Stream { return &Stream{in: bufio.NewReader(in)} }

// Next returns the next event, and io.EOF after the last one.
func (s *Stream) Next() (Event, error) {
	var event Event
	var data bytes.Buffer
	some := false
	for {
		err := s.readLine()
		if err != nil && !errors.Is(err, io.EOF) {
			return Event{}, err
		}
		if len(s.line) > 0 {
			field, value := cutField(s.line)
			switch string(field) {
			case "data":
				if some {
					data.WriteByte('\n')
				}
				some = true
				if data.Len()+len(value) > maxEventBytes {
					return Event{}, fmt.Errorf("%w: an event of more than %d bytes", ErrTooLong, maxEventBytes)
				}
				data.Write(value)
			case "event":
				event.Name = string(value)
			}
		}
		ended := len(s.line) == 0 || err != nil
		switch {
		case ended && some:
			event.Data = data.String()
			return event, nil
		case err != nil:
			return Event{}, err
		case ended:
			event = Event{}
		}
	}
}

// readLine fills line up to the next line end, which is CR, LF or both. With
// io.EOF it may hold the beginning of a line.
func (s *Stream) readLine() error {
	s.line = s.line[:0]
	for {
		b, err := s.in.ReadByte()
		if err != nil {
			s.begin()
			return err
		}
		if s.read++; s.read > maxStreamBytes {
			return fmt.Errorf("%w: more than %d bytes", ErrTooLong, int64(maxStreamBytes))
		}
		follows := s.afterCR
		s.afterCR = b == '\r'
		switch {
		case b == '\n' && follows:
			continue
		case b == '\n', b == '\r':
			s.begin()
			return nil
		}
		if len(s.line) >= maxEventBytes {
			return fmt.Errorf("%w: a line of more than %d bytes", ErrTooLong, maxEventBytes)
		}
		s.line = append(s.line, b)
	}
}

// begin takes the byte order mark off the first line.
func (s *Stream) begin() {
	if !s.begun {
		s.line = bytes.TrimPrefix(s.line, []byte("\ufeff"))
		s.begun = true
	}
}

// cutField parts a line at its colon; one space behind it belongs to neither. A
// comment has an empty field.
func cutField(line []byte) (field, value []byte) {
	field, value, _ = bytes.Cut(line, []byte(":"))
	return field, bytes.TrimPrefix(value, []byte(" "))
}
