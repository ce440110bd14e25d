package actors

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/json"
)

const (
	modelNamespace = "llm"
	modelWorkload  = "model-server"
	modelActor     = "rehearsal/model-server"
)

// modelServer stands in for vLLM: the OpenAI routes answer with a few fixed
// words, under the model name the pod's arguments give.
//
// It loads no weights, needs no GPU memory and says nothing of speed, of chat
// templates or of whether the arguments suit the model.
type modelServer struct{ *plane }

func newModelServer(p *plane) *actor {
	m := &modelServer{p}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"version": "rehearsal"})
	})
	mux.HandleFunc("GET /metrics", m.metrics)
	mux.HandleFunc("GET /v1/models", m.models)
	mux.HandleFunc("POST /v1/chat/completions", m.chat)
	mux.HandleFunc("POST /v1/completions", m.complete)
	p.directory.add(&server{address: address{modelNamespace, modelWorkload, 8000}, name: modelActor, handler: mux})
	return &actor{name: modelActor, watches: []kind{deployments, statefulSets, pods}, reconcile: m.reconcile}
}

func (m *modelServer) reconcile(ctx context.Context) error {
	// The chart makes a Deployment or a StatefulSet.
	for _, k := range []kind{deployments, statefulSets} {
		r, ok, err := m.standIn(modelActor, k, modelNamespace, modelWorkload)
		if err != nil {
			return err
		}
		if ok {
			if _, err := r.mark(ctx, k, m.get(k, modelNamespace, modelWorkload)); err != nil {
				return err
			}
		}
	}
	return nil
}

// names are what vLLM would serve: --served-model-name, else --model or the
// positional argument of `vllm serve`.
func (m *modelServer) names() []string {
	pod := m.readyPod(modelNamespace, modelWorkload)
	if pod == nil {
		return nil
	}
	var served, model []string
	for _, c := range items(pod.Object, "spec", "containers") {
		args := append(slices.Clone(texts(c, "command")), texts(c, "args")...)
		for i, a := range args {
			flag, value, inline := strings.Cut(a, "=")
			rest := args[i+1:]
			if inline {
				rest = []string{value}
			} else if end := slices.IndexFunc(rest, func(s string) bool { return strings.HasPrefix(s, "-") }); end >= 0 {
				rest = rest[:end]
			}
			switch {
			case len(rest) == 0:
			case flag == "--served-model-name":
				served = rest
			case flag == "--model" || a == "serve":
				model = rest[:1]
			}
		}
		// The image's entrypoint is `vllm serve`: its first argument is the model.
		if args := texts(c, "args"); model == nil && len(args) > 0 && !strings.HasPrefix(args[0], "-") {
			model = args[:1]
		}
	}
	if len(served) > 0 {
		return served
	}
	return model
}

func (m *modelServer) models(w http.ResponseWriter, _ *http.Request) {
	data := []any{}
	for _, name := range m.names() {
		data = append(data, map[string]any{"id": name, "object": "model", "created": time.Now().Unix(), "owned_by": "vllm", "root": name})
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": data})
}

func (m *modelServer) metrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	for _, name := range m.names() {
		for _, gauge := range []string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} {
			_, _ = fmt.Fprintf(w, "# TYPE %s gauge\n%s{engine=\"0\",model_name=%q} 0\n", gauge, gauge, name)
		}
	}
}

// question is what of an OpenAI request changes the answer.
type question struct {
	Model         string `json:"model"`
	Prompt        any    `json:"prompt"`
	Messages      []any  `json:"messages"`
	MaxTokens     *int   `json:"max_tokens"`
	MaxCompletion *int   `json:"max_completion_tokens"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

func (m *modelServer) chat(w http.ResponseWriter, r *http.Request) {
	q, ok := m.ask(w, r)
	if !ok {
		return
	}
	if len(q.Messages) == 0 {
		refuse(w, http.StatusBadRequest, "BadRequestError", "messages: field required")
		return
	}
	m.say(w, q, "chat.completion", func(text string, delta bool) map[string]any {
		part := map[string]any{"index": 0, "finish_reason": nil}
		message := map[string]any{"role": "assistant", "content": text}
		if delta {
			part["delta"] = message
		} else {
			part["message"] = message
		}
		return part
	})
}

func (m *modelServer) complete(w http.ResponseWriter, r *http.Request) {
	q, ok := m.ask(w, r)
	if !ok {
		return
	}
	if q.Prompt == nil {
		refuse(w, http.StatusBadRequest, "BadRequestError", "prompt: field required")
		return
	}
	m.say(w, q, "text_completion", func(text string, _ bool) map[string]any {
		return map[string]any{"index": 0, "text": text, "finish_reason": nil}
	})
}

func (m *modelServer) ask(w http.ResponseWriter, r *http.Request) (*question, bool) {
	q := &question{}
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = json.Unmarshal(raw, q)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, "BadRequestError", "reading request: "+err.Error())
		return nil, false
	}
	names := m.names()
	if q.Model == "" && len(names) > 0 {
		q.Model = names[0]
	}
	if !slices.Contains(names, q.Model) {
		refuse(w, http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist.", q.Model))
		return nil, false
	}
	return q, true
}

func refuse(w http.ResponseWriter, code int, kind, message string) {
	writeJSON(w, code, map[string]any{"error": map[string]any{"message": message, "type": kind, "param": nil, "code": code}})
}

// say answers whole or as server-sent events, one word a token.
func (m *modelServer) say(w http.ResponseWriter, q *question, object string, choice func(text string, delta bool) map[string]any) {
	tokens := strings.SplitAfter("This answer is simulated by the rehearsal .", " ")
	finish := "stop"
	for _, limit := range []*int{q.MaxTokens, q.MaxCompletion} {
		if limit != nil && *limit > 0 && *limit < len(tokens) {
			tokens, finish = tokens[:*limit], "length"
		}
	}
	prompt := len(q.Messages)
	if q.Prompt != nil {
		prompt = len(strings.Fields(fmt.Sprint(q.Prompt)))
	}
	usage := map[string]any{"prompt_tokens": prompt, "completion_tokens": len(tokens), "total_tokens": prompt + len(tokens)}
	base := map[string]any{"id": "rehearsal-" + strconv.FormatInt(time.Now().UnixNano(), 36), "object": object, "created": time.Now().Unix(), "model": q.Model}
	if !q.Stream {
		c := choice(strings.TrimSpace(strings.Join(tokens, "")), false)
		c["finish_reason"] = finish
		writeJSON(w, http.StatusOK, union(base, map[string]any{"choices": []any{c}, "usage": usage}))
		return
	}
	if object == "chat.completion" {
		base["object"] = "chat.completion.chunk"
	}
	w.Header().Set("Content-Type", "text/event-stream")
	flusher := http.NewResponseController(w)
	send := func(chunk map[string]any) {
		raw, err := json.Marshal(union(base, chunk))
		if err != nil {
			return
		}
		_, _ = fmt.Fprintf(w, "data: %s\n\n", raw)
		_ = flusher.Flush()
	}
	for i, t := range tokens {
		c := choice(t, true)
		if i == len(tokens)-1 {
			c["finish_reason"] = finish
		}
		send(map[string]any{"choices": []any{c}})
	}
	if q.StreamOptions.IncludeUsage {
		send(map[string]any{"choices": []any{}, "usage": usage})
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
	_ = flusher.Flush()
}
