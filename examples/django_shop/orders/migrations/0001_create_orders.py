"""Create the table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The first migration."""

    operations = [  # noqa: RUF012 - as Django declares it
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.CharField(max_length=40, unique=True)),
                ("email", models.EmailField(max_length=254)),
                ("is_counted", models.BooleanField(default=False)),
            ],
        )
    ]
