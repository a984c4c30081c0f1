//! KV memory of tenants at the time of a scrape.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

use super::models::WithModel;

/// Bytes of KV memory that a tenant holds in one engine.
#[derive(Debug, Clone)]
pub(crate) struct TenantMemory {
    pub(crate) tenant: String,
    pub(crate) in_use: u64,
    pub(crate) idle: u64,
    pub(crate) reserved: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantLabels {
    tenant: String,
    state: &'static str,
}

/// Exports the memory of tenants, each with the model that holds it, if there are several.
#[derive(Debug)]
pub(super) struct TenantCollector(pub(super) Vec<(Option<String>, TenantMemory)>);

impl Collector for TenantCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = "KV memory that a tenant holds: in use, idle in its prefix cache, or reserved";
        let kind = ConstGauge::new(0.0).metric_type();
        let mut family = encoder.encode_descriptor("pellucid_tenant_kv_bytes", help, None, kind)?;
        for (model, memory) in &self.0 {
            let states = [("in_use", memory.in_use), ("idle", memory.idle), ("reserved", memory.reserved)];
            for (state, bytes) in states {
                let labels = TenantLabels { tenant: memory.tenant.clone(), state };
                let labels = WithModel { labels, model: model.clone() };
                ConstGauge::new(bytes as f64).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
