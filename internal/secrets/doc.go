// Package secrets keeps the box's secrets: it generates what nobody gave, sets
// up Vault and hands the secrets over to it. It must not know charts, the
// installer or how anything is shown; no secret value leaves it in an error, a
// log line or a URL.
package secrets
