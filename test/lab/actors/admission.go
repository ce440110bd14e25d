package actors

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
)

// admission is the part of an AdmissionReview request that actors look at.
type admission struct {
	UID       string         `json:"uid"`
	Operation string         `json:"operation"`
	Name      string         `json:"name"`
	Namespace string         `json:"namespace"`
	Object    map[string]any `json:"object"`

	path string // of the webhook's URL
}

// verdict is the answer to one.
type verdict struct {
	allowed bool
	message string
	patch   []map[string]any // JSON patch
}

func allowed() *verdict { return &verdict{allowed: true} }

func denied(message string) *verdict { return &verdict{message: message} }

// admit serves an admission webhook.
func admit(decide func(*admission) *verdict) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review struct {
			APIVersion string     `json:"apiVersion"`
			Kind       string     `json:"kind"`
			Request    *admission `json:"request"`
		}
		if !readJSON(w, r, &review) {
			return
		}
		if review.Request == nil {
			http.Error(w, "no request in AdmissionReview", http.StatusBadRequest)
			return
		}
		review.Request.path = r.URL.Path
		v := decide(review.Request)
		response := map[string]any{"uid": review.Request.UID, "allowed": v.allowed}
		if v.message != "" {
			response["status"] = map[string]any{"message": v.message, "code": http.StatusBadRequest}
		}
		if len(v.patch) > 0 {
			raw, err := json.Marshal(v.patch)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			response["patchType"], response["patch"] = "JSONPatch", raw
		}
		writeJSON(w, http.StatusOK, map[string]any{"apiVersion": review.APIVersion, "kind": review.Kind, "response": response})
	})
}

// trust puts the actors' CA into the webhooks of a configuration.
func (r *role) trust(ctx context.Context, k kind, hook *unstructured.Unstructured) error {
	bundle := base64.StdEncoding.EncodeToString(r.ca.bundle)
	return r.update(ctx, k, hook, func(m map[string]any) {
		for _, w := range items(m, "webhooks") {
			if c := sub(w, "clientConfig"); c != nil {
				c["caBundle"] = bundle
			}
		}
	})
}

const maxBody = 8 << 20

// readJSON decodes a request; an empty body decodes to nothing.
func readJSON(w http.ResponseWriter, r *http.Request, into any) bool {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil && len(raw) > 0 {
		err = json.Unmarshal(raw, into)
	}
	if err != nil {
		http.Error(w, "reading request: "+err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(raw)
}
