package main

import (
	"maps"
	"slices"

	kubernetes "github.com/hashicorp/vault-plugin-auth-kubernetes"
	kv "github.com/hashicorp/vault-plugin-secrets-kv"
	"github.com/hashicorp/vault/sdk/helper/consts"
	"github.com/hashicorp/vault/sdk/logical"
)

const (
	kvPlugin         = "kv"
	kubernetesPlugin = "kubernetes"
)

// builtins are the plugins inside this program; any other type of mount is unknown.
type builtins struct{}

func (builtins) secrets() map[string]logical.Factory {
	return map[string]logical.Factory{kvPlugin: kv.Factory}
}

func (builtins) auth() map[string]logical.Factory {
	return map[string]logical.Factory{kubernetesPlugin: kubernetes.Factory}
}

func (b builtins) of(kind consts.PluginType) map[string]logical.Factory {
	switch kind {
	case consts.PluginTypeSecrets:
		return b.secrets()
	case consts.PluginTypeCredential:
		return b.auth()
	default:
		return nil
	}
}

// Contains says whether the plugin is inside.
func (b builtins) Contains(name string, kind consts.PluginType) bool {
	_, ok := b.of(kind)[name]
	return ok
}

// Get returns what makes the plugin's factory.
func (b builtins) Get(name string, kind consts.PluginType) (func() (any, error), bool) {
	factory, ok := b.of(kind)[name]
	if !ok {
		return nil, false
	}
	return func() (any, error) { return factory, nil }, true
}

// Keys lists the plugins of one kind.
func (b builtins) Keys(kind consts.PluginType) []string {
	return slices.Sorted(maps.Keys(b.of(kind)))
}

// DeprecationStatus is that of a plugin in use.
func (b builtins) DeprecationStatus(name string, kind consts.PluginType) (consts.DeprecationStatus, bool) {
	return consts.Supported, b.Contains(name, kind)
}

// IsBuiltinEntPlugin asks for the plugins of Vault Enterprise.
func (builtins) IsBuiltinEntPlugin(string, consts.PluginType) bool { return false }
