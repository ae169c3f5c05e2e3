//! Takes spans from `tracing`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::metrics::Counts;
use crate::secret::random;

/// Events of one span; more are left out.
const EVENTS_MAX: usize = 32;
/// Attributes of one span or event.
const ATTRIBUTES_MAX: usize = 32;
/// Characters of a text.
const TEXT_MAX: usize = 1024;

/// A span that has ended.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) trace: String,
    pub(super) id: String,
    pub(super) parent: Option<String>,
    pub(super) name: &'static str,
    pub(super) start_ns: u128,
    pub(super) end_ns: u128,
    pub(super) attributes: Vec<(&'static str, Value)>,
    pub(super) events: Vec<(u128, Vec<(&'static str, Value)>)>,
    /// What went wrong, if something did.
    pub(super) error: Option<String>,
}

/// A layer that sends ended spans to an [`Exporter`](super::Exporter).
pub struct SpanLayer {
    to: SyncSender<Option<Span>>,
    counts: Arc<Counts>,
}

impl SpanLayer {
    pub(super) fn new(to: SyncSender<Option<Span>>, counts: Arc<Counts>) -> Self {
        Self { to, counts }
    }
}

fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("forebay") && *metadata.level() <= Level::INFO
}

fn now_ns() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos())
}

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id).filter(|_| is_ours(attributes.metadata())) else {
            return;
        };
        // Without random bytes there are no traces.
        let Ok(random) = random() else { return };
        let (trace, own) = random.split_at_checked(32).unwrap_or_default();
        let above = span.parent().and_then(|parent| {
            let extensions = parent.extensions();
            extensions.get::<Span>().map(|above| (above.trace.clone(), above.id.clone()))
        });
        let (trace, parent) = match above {
            Some((trace, id)) => (trace, Some(id)),
            None => (trace.to_owned(), None),
        };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(Span {
            trace,
            id: own.get(..16).unwrap_or_default().to_owned(),
            parent,
            name: attributes.metadata().name(),
            start_ns: now_ns(),
            end_ns: 0,
            attributes: fields.0,
            events: Vec::new(),
            error: None,
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(data) = extensions.get_mut::<Span>() else { return };
        let mut fields = Fields::default();
        values.record(&mut fields);
        let room = ATTRIBUTES_MAX.saturating_sub(data.attributes.len());
        data.attributes.extend(fields.0.into_iter().take(room));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let Some(span) = context.event_span(event).filter(|_| is_ours(event.metadata())) else {
            return;
        };
        let mut extensions = span.extensions_mut();
        let Some(data) = extensions.get_mut::<Span>() else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        if *event.metadata().level() <= Level::WARN {
            let text = |name| fields.0.iter().find(|(field, _)| *field == name);
            let text = text("error").or_else(|| text("message")).map(|(_, value)| value);
            data.error = Some(text.and_then(Value::as_str).unwrap_or("failed").to_owned());
        }
        if data.events.len() < EVENTS_MAX {
            data.events.push((now_ns(), fields.0));
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).and_then(|span| span.extensions_mut().remove::<Span>());
        let Some(mut span) = span else { return };
        span.end_ns = now_ns();
        if self.to.try_send(Some(span)).is_err() {
            self.counts.spans_lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Fields as JSON.
#[derive(Default)]
struct Fields(Vec<(&'static str, Value)>);

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        if self.0.len() < ATTRIBUTES_MAX {
            self.0.push((field.name(), value));
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.chars().take(TEXT_MAX).collect::<String>().into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}
