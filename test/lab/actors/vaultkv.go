package actors

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// kvSecret is one path of a KV version 2 mount.
type kvSecret struct {
	created, updated time.Time
	max              int64
	cas              bool
	custom           map[string]any
	versions         map[int64]*kvVersion
	current, oldest  int64
}

type kvVersion struct {
	data             map[string]any
	created, deleted time.Time
	destroyed        bool
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

func (s *kvSecret) meta(n int64) map[string]any {
	v := s.versions[n]
	return map[string]any{"version": n, "created_time": stamp(v.created), "deletion_time": stamp(v.deleted), "destroyed": v.destroyed, "custom_metadata": s.custom}
}

// secretEngine is everything outside sys/ and auth/: KV version 2 mounts.
func (v *vault) secretEngine(c *vaultCall) {
	mount := ""
	for key := range v.kv {
		if strings.HasPrefix(c.path+"/", key) && len(key) > len(mount) {
			mount = key
		}
	}
	if mount == "" {
		v.noRoute(c)
		return
	}
	kind, path, _ := strings.Cut(strings.TrimPrefix(c.path+"/", mount), "/")
	path = strings.Trim(path, "/")
	table := v.kv[mount]
	switch kind {
	case "config":
		if c.verb == http.MethodGet {
			reply(c.w, map[string]any{"max_versions": 0, "cas_required": false, "delete_version_after": "0s"})
			return
		}
		c.w.WriteHeader(http.StatusNoContent)
	case "data":
		v.kvData(c, table, path)
	case "metadata":
		v.kvMetadata(c, table, path)
	case "delete", "undelete", "destroy":
		secret := table[path]
		if secret != nil && c.verb == http.MethodPost {
			for _, n := range versionsOf(c.body) {
				if version := secret.versions[n]; version != nil {
					switch kind {
					case "delete":
						version.deleted = time.Now()
					case "undelete":
						version.deleted = time.Time{}
					case "destroy":
						version.destroyed, version.data = true, nil
					}
				}
			}
		}
		c.w.WriteHeader(http.StatusNoContent)
	default:
		v.noRoute(c)
	}
}

func versionsOf(body map[string]any) []int64 {
	var out []int64
	list, _ := body["versions"].([]any)
	for _, i := range list {
		out = append(out, integer(map[string]any{"n": i}, "n"))
	}
	return out
}

func (v *vault) kvData(c *vaultCall, table map[string]*kvSecret, path string) {
	secret := table[path]
	switch c.verb {
	case http.MethodGet:
		n := int64(0)
		if secret != nil {
			n = secret.current
		}
		if text := c.r.URL.Query().Get("version"); text != "" && text != "0" {
			asked, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				fail(c.w, http.StatusBadRequest, "reading version: "+err.Error())
				return
			}
			n = asked
		}
		if secret == nil || secret.versions[n] == nil {
			fail(c.w, http.StatusNotFound)
			return
		}
		version := secret.versions[n]
		if !version.deleted.IsZero() || version.destroyed {
			writeJSON(c.w, http.StatusNotFound, map[string]any{"data": map[string]any{"data": nil, "metadata": secret.meta(n)}})
			return
		}
		reply(c.w, map[string]any{"data": version.data, "metadata": secret.meta(n)})
	case http.MethodPost, http.MethodPatch:
		v.kvWrite(c, table, path)
	case http.MethodDelete:
		if secret != nil && secret.versions[secret.current] != nil {
			secret.versions[secret.current].deleted = time.Now()
		}
		c.w.WriteHeader(http.StatusNoContent)
	default:
		fail(c.w, http.StatusMethodNotAllowed, "unsupported operation")
	}
}

func (v *vault) kvWrite(c *vaultCall, table map[string]*kvSecret, path string) {
	data := sub(c.body, "data")
	if data == nil {
		fail(c.w, http.StatusBadRequest, "no data provided")
		return
	}
	secret := table[path]
	current := int64(0)
	if secret != nil {
		current = secret.current
	}
	if at(c.body, "options", "cas") != nil {
		if integer(c.body, "options", "cas") != current {
			fail(c.w, http.StatusBadRequest, "check-and-set parameter did not match the current version")
			return
		}
	} else if secret != nil && secret.cas {
		fail(c.w, http.StatusBadRequest, "check-and-set parameter required for this call")
		return
	}
	if c.verb == http.MethodPatch {
		if secret == nil || secret.versions[current] == nil || secret.versions[current].data == nil {
			fail(c.w, http.StatusNotFound)
			return
		}
		merged := maps.Clone(secret.versions[current].data)
		for k, value := range data { // one level is all that is kept in a rehearsal
			if value == nil {
				delete(merged, k)
			} else {
				merged[k] = value
			}
		}
		data = merged
	}
	now := time.Now()
	if secret == nil {
		secret = &kvSecret{created: now, versions: map[int64]*kvVersion{}}
		table[path] = secret
	}
	secret.current++
	secret.updated = now
	secret.versions[secret.current] = &kvVersion{data: data, created: now}
	limit := secret.max
	if limit == 0 {
		limit = 10 // Vault's default
	}
	for n := range secret.versions {
		if n <= secret.current-limit {
			delete(secret.versions, n)
		}
	}
	secret.oldest = slices.Min(slices.Collect(maps.Keys(secret.versions)))
	reply(c.w, secret.meta(secret.current))
}

func (v *vault) kvMetadata(c *vaultCall, table map[string]*kvSecret, path string) {
	secret := table[path]
	switch c.verb {
	case "LIST":
		keys := kvList(table, path)
		if len(keys) == 0 {
			fail(c.w, http.StatusNotFound)
			return
		}
		reply(c.w, map[string]any{"keys": keys})
	case http.MethodGet:
		if secret == nil {
			fail(c.w, http.StatusNotFound)
			return
		}
		versions := map[string]any{}
		for n := range secret.versions {
			m := secret.meta(n)
			delete(m, "version")
			delete(m, "custom_metadata")
			versions[strconv.FormatInt(n, 10)] = m
		}
		reply(c.w, map[string]any{"current_version": secret.current, "oldest_version": secret.oldest, "max_versions": secret.max, "cas_required": secret.cas,
			"created_time": stamp(secret.created), "updated_time": stamp(secret.updated), "delete_version_after": "0s",
			"custom_metadata": secret.custom, "versions": versions})
	case http.MethodPost:
		if secret == nil {
			secret = &kvSecret{created: time.Now(), versions: map[int64]*kvVersion{}}
			table[path] = secret
		}
		secret.updated, secret.max, secret.cas = time.Now(), integer(c.body, "max_versions"), truth(c.body, "cas_required")
		secret.custom = sub(c.body, "custom_metadata")
		c.w.WriteHeader(http.StatusNoContent)
	case http.MethodDelete:
		delete(table, path)
		c.w.WriteHeader(http.StatusNoContent)
	default:
		fail(c.w, http.StatusMethodNotAllowed, "unsupported operation")
	}
}

// kvList names what is directly under a folder; folders end with a slash.
func kvList(table map[string]*kvSecret, folder string) []string {
	if folder != "" {
		folder += "/"
	}
	found := map[string]bool{}
	for path := range table {
		if rest, ok := strings.CutPrefix(path, folder); ok {
			head, _, deeper := strings.Cut(rest, "/")
			if deeper {
				head += "/"
			}
			found[head] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}
