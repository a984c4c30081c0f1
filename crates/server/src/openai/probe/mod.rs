//! The field `probe` of a request; `report` has the result in the reply's `pellucid` object.

mod report;

use pellucid_engine::{AttentionProbe, MAX_PROBE_ROWS, ProbeRequest};
use pellucid_sampling::MAX_LOGPROBS;
use utoipa::ToSchema;

use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::limits::tenants::Tenant;

pub(crate) use report::ProbeReport;

/// Largest index that the fields take; the engine compares with the model and the reply.
const MAX_INDEX: i64 = 1 << 20;
/// Bytes of a reply for each reported weight, and for each token that it belongs to.
const BYTES_PER_WEIGHT: usize = 20;

/// Computes one token of the reply again, outside the batch, and reports what is inside the model. Needs `layers`,
/// `attention` or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[allow(dead_code)] // For the document.
pub(crate) struct ProbeFields {
    /// Index of the token in the reply.
    #[schema(minimum = 0, maximum = 1048576, default = 0)]
    token: Option<usize>,
    /// Most probable tokens to report after each layer.
    #[schema(minimum = 1, maximum = 20)]
    layers: Option<u32>,
    /// Attention weights to report.
    attention: Option<AttentionFields>,
}

/// The attention weights that a probe reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[allow(dead_code)] // For the document.
pub(crate) struct AttentionFields {
    /// Index of the layer, from 0.
    #[schema(minimum = 0, maximum = 1048576)]
    layer: usize,
    /// Index of the head, from 0. Without it, the mean of all heads is reported.
    #[schema(minimum = 0, maximum = 1048576)]
    head: Option<usize>,
    /// Number of positions to report, the last of which is the one that the token was sampled at.
    #[schema(minimum = 1, maximum = 64, default = 1)]
    rows: Option<usize>,
}

/// Reads the field.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<ProbeRequest>, ApiError> {
    let Some(value) = fields.take("probe") else { return Ok(None) };
    let mut fields = Fields::within(fields.path("probe"), value)?;
    let probe = ProbeRequest {
        token: fields.whole("token", 0..=MAX_INDEX)?.unwrap_or(0),
        layers: fields.whole("layers", 1..=i64::from(MAX_LOGPROBS))?,
        attention: read_attention(&mut fields)?,
    };
    let path = fields.path("layers");
    fields.finish()?;
    if probe.layers.is_none() && probe.attention.is_none() {
        return Err(ApiError::field(path, "probe: expected layers, attention or both"));
    }
    Ok(Some(probe))
}

fn read_attention(fields: &mut Fields) -> Result<Option<AttentionProbe>, ApiError> {
    let Some(value) = fields.take("attention") else { return Ok(None) };
    let mut fields = Fields::within(fields.path("attention"), value)?;
    let path = fields.path("layer");
    let Some(layer) = fields.whole("layer", 0..=MAX_INDEX)? else {
        return Err(ApiError::field(path.clone(), format!("{path}: missing")));
    };
    let attention = AttentionProbe {
        layer,
        head: fields.whole("head", 0..=MAX_INDEX)?,
        rows: fields.whole("rows", 1..=MAX_PROBE_ROWS as i64)?.unwrap_or(1),
    };
    fields.finish()?;
    Ok(Some(attention))
}

/// Refuses a probe to keys without the right to it.
pub(crate) fn check_right(tenant: &Tenant) -> Result<(), ApiError> {
    if tenant.config.probe {
        return Ok(());
    }
    let message = "probe is not allowed for this key, because it shows the inside of the model; `probe = true` in the \
                   keys file allows it";
    Err(ApiError::refused(axum::http::StatusCode::FORBIDDEN, "probe_not_allowed", message).param("probe"))
}

/// Returns the memory that the result takes in a reply to a prompt of `num_prompt` tokens.
pub(crate) fn held_bytes(probe: &ProbeRequest, num_prompt: usize) -> usize {
    let num_rows = probe.attention.map_or(0, |attention| attention.rows + 2);
    num_rows.saturating_mul(num_prompt + probe.token).saturating_mul(BYTES_PER_WEIGHT)
}
