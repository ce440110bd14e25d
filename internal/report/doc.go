// Package report renders the event stream: a terminal screen, plain lines,
// NDJSON, and the final account as text and as a self-contained HTML page. All
// of them are folds over the same events, so none can say what another does not
// know.
//
// It must not know who emits the events, decide anything about a run, or be
// asked a question back: the only thing that leaves it is a request to stop.
package report
