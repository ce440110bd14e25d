package installer

import (
	"context"
	"errors"

	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/secrets"
)

// boxSecrets joins the secrets package to a run.
type boxSecrets struct {
	client *cluster.Client
	box    config.Box
	vault  *secrets.Vault
}

// NewSecrets returns what a run of this box needs done about secrets.
func NewSecrets(client *cluster.Client, box config.Box) (Secrets, error) {
	vault, err := secrets.NewVault(client, secrets.VaultOptions{HFTokenFile: box.Secrets.HFTokenFile})
	if err != nil {
		return nil, err
	}
	return &boxSecrets{client: client, box: box, vault: vault}, nil
}

func (b *boxSecrets) Ensure(ctx context.Context) error {
	return secrets.EnsureBoxSecrets(ctx, b.client.Kube, secrets.BoxSecrets{
		Grafana:     b.box.Mode(prometheusStep) == string(component.Install),
		GatewayKeys: true,
		HFTokenFile: b.box.Secrets.HFTokenFile,
	})
}

func (b *boxSecrets) GatewayKey(ctx context.Context) (string, error) {
	return secrets.GatewayKey(ctx, b.client.Kube, secrets.DefaultClient)
}

// SetUpVault starts an empty Vault anew when a crash between its answer and the
// writing of its key lost the key: nothing can have been stored in it yet.
func (b *boxSecrets) SetUpVault(ctx context.Context) error {
	err := b.vault.SetUp(ctx)
	var lost *secrets.LostKeysError
	if errors.As(err, &lost) && lost.Empty {
		if err := b.vault.DiscardEmpty(ctx); err != nil {
			return err
		}
		return secrets.ErrNotAnswering
	}
	return err
}

func (b *boxSecrets) VaultReady(ctx context.Context) (cluster.Verdict, error) {
	ready, waiting, by, err := b.vault.Ready(ctx)
	return cluster.Verdict{Ready: ready, Waiting: waiting, SimulatedBy: by}, err
}
