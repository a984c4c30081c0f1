//! Keys and certificates of `serve`, read from their files at start and at each reload.

use std::path::Path;

use anyhow::{Context, Result};
use pellucid_server::{KeysFile, PemFile, TenantConfig, Tenants, Tls};

use super::ServeArgs;
use crate::flags::text_file;

/// Returns the tenants of the keys file and of `--api-key`; without either, everyone may send requests.
pub(super) fn tenants(args: &ServeArgs) -> Result<Tenants> {
    let configs = tenant_configs(args.keys_file.as_deref(), args.api_key.as_deref())?;
    if configs.is_empty() {
        return Ok(Tenants::open());
    }
    let tenants = Tenants::new(configs);
    match &args.keys_file {
        None => tenants.context("--api-key"),
        Some(path) => tenants.with_context(|| path.display().to_string()),
    }
}

/// Returns the tenants of a keys file, and one for the key of `--api-key`.
pub(super) fn tenant_configs(keys_file: Option<&Path>, api_key: Option<&str>) -> Result<Vec<TenantConfig>> {
    let mut configs = Vec::new();
    if let Some(path) = keys_file {
        let text = text_file::read(path).context("--keys-file")?;
        configs = KeysFile::parse(&text).with_context(|| path.display().to_string())?.tenant;
    }
    if let Some(key) = api_key {
        configs.push(TenantConfig {
            name: "default".into(),
            keys: vec![key.to_owned()],
            // The person who sets the server's flags is its operator.
            trace: true,
            probe: true,
            metrics: true,
            manage_models: true,
            manage_requests: true,
            pull: true,
            ..TenantConfig::default()
        });
    }
    Ok(configs)
}

/// Returns the certificate of `--tls-cert` and `--tls-key`, if they are set.
pub(super) fn tls(args: &ServeArgs) -> Result<Option<Tls>> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    with_pem_files(certificate, key, |certificate, key| Ok(Some(Tls::from_pem(certificate, key)?)))
}

/// Reads both files again and replaces the certificate.
pub(super) fn reload_certificate(certificate: &Path, key: &Path, tls: &Tls) -> Result<()> {
    with_pem_files(certificate, key, |certificate, key| Ok(tls.replace(certificate, key)?))
}

fn with_pem_files<T>(
    certificate: &Path,
    key: &Path,
    work: impl FnOnce(PemFile<'_>, PemFile<'_>) -> Result<T>,
) -> Result<T> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let (chain, private) = (read(certificate)?, read(key)?);
    let [certificate, key] = [certificate, key].map(|path| path.display().to_string());
    work(PemFile { name: &certificate, content: &chain }, PemFile { name: &key, content: &private })
}
