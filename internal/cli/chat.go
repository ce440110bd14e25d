package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/openai"
	"github.com/llmbox-dev/llmbox/internal/secrets"
)

const (
	// maxPromptBytes is more than any context holds.
	maxPromptBytes = 4 << 20
	// tokenWait is the longest silence: a long prompt on a busy box takes its time.
	tokenWait = 2 * time.Minute
)

type chatFlags struct {
	system      string
	model       string
	keyFile     string
	maxTokens   int
	temperature float64
	timeout     time.Duration
}

func (a *app) chatCommand() *cobra.Command {
	var flags chatFlags
	cmd := &cobra.Command{
		Use:   "chat [PROMPT]",
		Short: "Ask the model through the gateway and show the answer as it comes",
		Long: `chat sends a prompt the way every client does: through the gateway, with a key. The
prompt is the argument, or standard input if that is no terminal; on a terminal
without a prompt it is a conversation, which /bye or Ctrl-D ends.`,
		Example: `  llmbox chat "What is a GPU?"
  llmbox chat --system "Answer in one line." --max-tokens 64 < question.txt
  llmbox chat --key-file ci.key --output json hello | jq .tokens_per_second
  llmbox chat`,
		RunE: func(cmd *cobra.Command, args []string) error { return a.runChat(cmd, args, &flags) },
	}
	f := cmd.Flags()
	f.StringVar(&flags.system, "system", "", "instructions for the model, before the prompt")
	f.StringVar(&flags.model, "model", "", "name of the model to ask (default: the one that is served)")
	f.StringVar(&flags.keyFile, "key-file", "", "file with the key to use (default: the box's own)")
	f.IntVar(&flags.maxTokens, "max-tokens", 0, "longest answer, in tokens (default: what the context leaves)")
	f.Float64Var(&flags.temperature, "temperature", 0, "0 for always the same answer, up to 2 (default: the model's own)")
	f.DurationVar(&flags.timeout, "timeout", tokenWait, "longest time without a token")
	return cmd
}

func (f *chatFlags) check() error {
	switch {
	case f.maxTokens < 0:
		return usageError{fmt.Errorf("--max-tokens is %d", f.maxTokens), "say a number of tokens above 0"}
	case math.IsNaN(f.temperature) || f.temperature < 0 || f.temperature > 2:
		return usageError{fmt.Errorf("--temperature is %v", f.temperature), "say a number from 0 to 2"}
	}
	return checkTimeout(f.timeout)
}

func (a *app) runChat(cmd *cobra.Command, args []string, flags *chatFlags) error {
	if err := flags.check(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	prompt, talk, err := a.prompt(ctx, args)
	if err != nil {
		return err
	}
	_, door, key, err := a.endpoint(ctx, cmd, flags.keyFile)
	if err != nil {
		return err
	}
	c := &chat{
		client: openai.New(door.HTTP, door.URL, key, flags.timeout),
		ask:    openai.Request{Model: flags.model, MaxTokens: flags.maxTokens},
		stdout: a.env.Stdout, stderr: a.env.Stderr, terminal: a.env.Terminal, silent: a.output == "json",
		complain: func(err error) { a.printError(chatError(err, flags.keyFile)) },
	}
	if cmd.Flags().Changed("temperature") {
		c.ask.Temperature = &flags.temperature
	}
	if flags.system != "" {
		c.ask.Messages = []openai.Message{{Role: "system", Content: flags.system}}
	}
	if c.ask.Model == "" {
		if c.ask.Model, err = served(ctx, c.client); err != nil {
			return chatError(err, flags.keyFile)
		}
	}
	if talk {
		return chatError(c.talk(ctx, a.env.Stdin), flags.keyFile)
	}
	answer, err := c.say(ctx, prompt)
	if err != nil {
		return chatError(err, flags.keyFile)
	}
	if a.output == "json" {
		return a.printJSON(answerDoc(answer))
	}
	return nil
}

// prompt is what to ask; talk says that a person is to be asked for it.
func (a *app) prompt(ctx context.Context, args []string) (prompt string, talk bool, err error) {
	if len(args) > 0 {
		prompt = strings.Join(args, " ")
		if strings.TrimSpace(prompt) == "" {
			return "", false, usageError{errors.New("the prompt is empty"), `llmbox chat "What is a GPU?"`}
		}
		return prompt, false, nil
	}
	if file, ok := a.env.Stdin.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		if !a.env.Terminal || a.output == "json" {
			return "", false, usageError{errors.New("no prompt, and the answer does not go to a terminal"), "name it: llmbox chat PROMPT, or llmbox chat < FILE"}
		}
		return "", true, nil
	}
	type read struct {
		raw []byte
		err error
	}
	done := make(chan read, 1)
	go func() {
		raw, err := io.ReadAll(io.LimitReader(a.env.Stdin, maxPromptBytes+1))
		done <- read{raw, err}
	}()
	var in read
	select {
	case in = <-done:
	case <-ctx.Done():
		return "", false, installer.ErrInterrupted
	}
	prompt = strings.TrimRight(string(in.raw), "\r\n")
	switch {
	case in.err != nil:
		return "", false, fmt.Errorf("reading the prompt from standard input: %w", in.err)
	case len(in.raw) > maxPromptBytes:
		return "", false, usageError{fmt.Errorf("the prompt has more than %d bytes", maxPromptBytes), "shorten it"}
	case strings.TrimSpace(prompt) == "":
		return "", false, usageError{errors.New("there is no prompt"), "llmbox chat PROMPT, or llmbox chat < FILE"}
	}
	return prompt, false, nil
}

// endpoint is the way into the box by which clients come, and a key for it.
func (a *app) endpoint(ctx context.Context, cmd *cobra.Command, keyFile string) (*installedBox, installer.Door, string, error) {
	b, err := a.reach(ctx, cmd)
	if err != nil {
		return nil, installer.Door{}, "", chatError(err, keyFile)
	}
	key, err := b.chatKey(ctx, keyFile)
	if err != nil {
		return nil, installer.Door{}, "", err
	}
	door, err := b.door(ctx)
	if err != nil {
		return nil, installer.Door{}, "", doorError(err)
	}
	return b, door, key, nil
}

// chatKey is the key to ask with.
func (b *installedBox) chatKey(ctx context.Context, file string) (string, error) {
	if file != "" {
		key, err := secrets.ReadTokenFile(file)
		if err != nil {
			return "", usageError{fmt.Errorf("reading the key: %w", err), "put the key alone into that file: llmbox keys create NAME > " + file}
		}
		return key, nil
	}
	key, err := secrets.GatewayKey(ctx, b.client.Kube, secrets.DefaultClient)
	if errors.Is(err, secrets.ErrNoKey) {
		err = fixedError{err, "llmbox status shows whether the box is installed; llmbox keys create " + secrets.DefaultClient +
			" makes its key anew, --key-file FILE takes another one"}
	}
	return key, err
}

// doorError is why there is no gateway to ask.
func doorError(err error) error {
	if errors.Is(err, cluster.ErrForbidden) || errors.Is(err, cluster.ErrUnauthorized) || errors.Is(err, cluster.ErrUnreachable) ||
		errors.Is(err, context.Canceled) {
		return chatError(err, "")
	}
	return notReady("is the box installed? llmbox status shows what is there, llmbox install brings it in", "there is no gateway to ask: %w", err)
}

// served names the model to ask for.
func served(ctx context.Context, client *openai.Client) (string, error) {
	names, err := client.Models(ctx)
	if err != nil {
		return "", err
	}
	if len(names) == 0 {
		return "", notReady("llmbox status shows what is missing", "the model server serves no model")
	}
	return names[0], nil
}

// chat is one conversation.
type chat struct {
	client *openai.Client
	// ask holds the conversation so far.
	ask            openai.Request
	stdout, stderr io.Writer
	// terminal keeps what a model says from steering the screen.
	terminal bool
	// silent leaves stdout to whoever asks.
	silent bool
	// complain shows what went wrong with one question of several.
	complain func(error)
}

// say asks and writes the answer as it comes. A question without an answer is not
// part of the conversation.
func (c *chat) say(ctx context.Context, prompt string) (openai.Answer, error) {
	ask := c.ask
	ask.Messages = append(ask.Messages[:len(ask.Messages):len(ask.Messages)], openai.Message{Role: "user", Content: prompt})
	thinking, open := false, false
	answer, err := c.client.Chat(ctx, ask, func(d openai.Delta) error {
		if c.silent {
			return nil
		}
		if d.Reasoning != "" && c.terminal && !thinking {
			thinking = true
			_, _ = fmt.Fprint(c.stderr, "(thinking)\n")
		}
		text := d.Content
		if c.terminal {
			text = plain(text)
		}
		if text == "" {
			return nil
		}
		open = !strings.HasSuffix(text, "\n")
		if _, err := io.WriteString(c.stdout, text); err != nil {
			return fmt.Errorf("writing the answer: %w", err)
		}
		return nil
	})
	if open {
		_, _ = fmt.Fprintln(c.stdout)
	}
	if err != nil {
		return answer, err
	}
	if answer.FinishReason == "length" && !c.silent {
		_, _ = fmt.Fprintln(c.stderr, "(the answer ended at its limit of tokens; --max-tokens sets another)")
	}
	c.ask.Messages = append(ask.Messages, openai.Message{Role: "assistant", Content: answer.Content})
	return answer, nil
}

// plain takes control characters out of a text.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, text)
}

// talk asks what is typed until /bye or the end of the input. What goes wrong with one
// question doesn't end the conversation.
func (c *chat) talk(ctx context.Context, in io.Reader) error {
	lines := make(chan string)
	var readErr error
	go func() {
		defer close(lines)
		scanner := bufio.NewScanner(in)
		scanner.Buffer(nil, maxPromptBytes)
		for scanner.Scan() {
			select {
			case lines <- scanner.Text():
			case <-ctx.Done():
				return
			}
		}
		readErr = scanner.Err()
	}()
	_, _ = fmt.Fprintf(c.stderr, "Talking to %s. /bye or Ctrl-D ends.\n", plain(c.ask.Model))
	for {
		_, _ = fmt.Fprint(c.stderr, "> ")
		var line string
		var more bool
		select {
		case line, more = <-lines:
		case <-ctx.Done():
			_, _ = fmt.Fprintln(c.stderr)
			return ctx.Err()
		}
		switch line = strings.TrimSpace(line); {
		case !more:
			_, _ = fmt.Fprintln(c.stderr)
			if readErr != nil {
				return fmt.Errorf("reading what is typed: %w", readErr)
			}
			return nil
		case line == "/bye":
			return nil
		case line == "":
			continue
		}
		if _, err := c.say(ctx, line); err != nil {
			if ctx.Err() != nil {
				return err
			}
			c.complain(err)
		}
	}
}

// chatDoc is the document of chat --output json.
type chatDoc struct {
	Content string `json:"content"`
	// Reasoning is what a thinking model said before.
	Reasoning          string        `json:"reasoning,omitempty"`
	Usage              *openai.Usage `json:"usage"`
	Model              string        `json:"model"`
	FinishReason       string        `json:"finish_reason,omitempty"`
	TimeToFirstTokenMS int64         `json:"time_to_first_token_ms"`
	// TokensPerSecond is the rate after the first token; null if there was no second.
	TokensPerSecond *float64 `json:"tokens_per_second"`
}

func answerDoc(a openai.Answer) chatDoc {
	doc := chatDoc{
		Content: a.Content, Reasoning: a.Reasoning, Usage: a.Usage, Model: a.Model, FinishReason: a.FinishReason,
		TimeToFirstTokenMS: a.FirstToken.Milliseconds(),
	}
	if a.TokensPerSecond > 0 {
		rate := math.Round(a.TokensPerSecond*100) / 100
		doc.TokensPerSecond = &rate
	}
	return doc
}

// chatError says what an error means to whoever asked, and what to do.
func chatError(err error, keyFile string) error {
	var answer *openai.StatusError
	var silent *openai.SilenceError
	var broke *openai.StreamError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled):
		return installer.ErrInterrupted
	case errors.As(err, &answer):
		return statusError(answer, keyFile)
	case errors.As(err, &silent):
		return notReady("llmbox status shows whether the model server is ready; --timeout waits longer", "%w", err)
	case errors.As(err, &broke), errors.Is(err, openai.ErrCut):
		return fixedError{err, "ask again; kubectl -n llm logs -l app.kubernetes.io/name=model-server shows what the model server says"}
	case errors.Is(err, openai.ErrUnreachable):
		return notReady("is the box installed? llmbox status shows what is not ready", "the gateway does not answer: %w", err)
	case errors.Is(err, openai.ErrNotOpenAI):
		return fixedError{err, "something else than the box's model answers there: llmbox status shows its address"}
	}
	return err
}

// statusError reads the gateway's or the model server's refusal.
func statusError(answer *openai.StatusError, keyFile string) error {
	switch {
	case answer.Code == http.StatusUnauthorized && keyFile != "":
		return usageError{fmt.Errorf("the gateway does not take the key in %s: %w", keyFile, answer), "llmbox keys list shows the last characters of those it takes"}
	case answer.Code == http.StatusUnauthorized:
		return fixedError{fmt.Errorf("the gateway does not take the box's own key: %w", answer),
			"a key that was just made takes a second; llmbox keys list shows whether it is pending"}
	case answer.FromModel && answer.Code == http.StatusNotFound:
		return usageError{fmt.Errorf("the model server does not have it: %w", answer), "leave --model out to ask the one that is served"}
	case answer.FromModel && answer.Code < http.StatusInternalServerError:
		return usageError{fmt.Errorf("the model server refuses: %w", answer), "shorten the prompt or --max-tokens if it is about their length; llmbox models show NAME has the figures"}
	case answer.Code == http.StatusNotFound:
		return notReady("llmbox status shows what is missing, llmbox install brings it back", "the gateway has no route to a model: %w", answer)
	case answer.Code == http.StatusTooManyRequests:
		return notReady("wait a minute; gateway.rateLimit.requestsPerMinute sets the limit", "the gateway has let through as many requests as it may: %w", answer)
	case answer.Code == http.StatusServiceUnavailable && !answer.FromModel:
		return notReady("llmbox status shows what the model server waits for", "no model server is ready: %w", answer)
	case answer.Code == http.StatusInternalServerError && !answer.FromModel:
		return notReady("llmbox status shows whether the model is ready; kubectl -n llm get secret gateway-keys must exist",
			"the gateway can't serve its route: %w", answer)
	}
	return fixedError{answer, "llmbox status shows what is not ready"}
}
